"""The worked example of the algorithms guide does what its text says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.algos.advantages import AdvantageInputs, run_estimator
from miles.algos.config import AlgoConfig
from miles.algos.losses import policy_loss
from miles.algos.sequences import Sequences
from miles.recipe import load
from miles.recipe.rules import USER_CODE, model_facts

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "algorithms.md"


@pytest.fixture
def algo(tmp_path) -> AlgoConfig:
    """The example's two blocks as files of one folder, loaded the way a recipe is."""
    section = GUIDE.read_text().split("## Your own advantage or loss")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (options,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / code.split()[1]).write_text(code)
    (tmp_path / "own.yaml").write_text(f"name: own\n{options}")
    recipe = load(tmp_path / "own.yaml", ["algo.eps_clip_high=0.5"])
    assert list(USER_CODE.check(recipe, model_facts(recipe))) == []
    return recipe.algo


def test_the_example_s_advantage_is_the_distance_to_the_group_s_median(algo):
    inputs = AdvantageInputs(
        rewards=np.array([1.0, 0.0, 0.25, 0.0]),
        group_index=np.array([0, 0, 0, 1]),
        in_baseline=np.array([True, True, True, False]),
        rollout_index=np.arange(4),
        lengths=np.array([2, 1, 1, 1]),
        mask=np.array([True, True, True, True, True]),
        config=algo,
    )
    assert run_estimator(inputs).advantages.tolist() == [0.75, 0.75, -0.25, 0.0, 0.0]


def test_the_example_s_loss_bounds_the_ratio_above_only(algo):
    log_probs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = log_probs.detach() - torch.tensor([1.0, -1.0, 0.0])
    found = policy_loss(
        log_probs,
        old,
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([True, True, False]),
        Sequences(torch.zeros(3, dtype=torch.int64), torch.tensor([3])),
        algo,
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-1.5, -2.0 * float(np.exp(-1.0)), 0.0]))
