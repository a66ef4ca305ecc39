"""A bound on what a recipe never reports is refused, and the same bound passes where it is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles.config.metric_names import METRICS
from miles.recipe.measured import objections, unmeasured
from miles.recipe.schema import Recipe

KL = {"algo": {"kl": {"where": "loss", "estimator": "k2", "coef": 0.1}}}
REWARD_KL = {"algo": {"advantage": "reinforce_pp", "kl": {"where": "reward", "coef": 0.1}}}
GAE = {"algo": {"advantage": "gae"}}
TEACHER = {"algo": {"opd_coef": 0.5, "teacher": "models/teacher"}}
STALE = {"rollout": {"max_staleness": 1}, "algo": {"correction": {"mode": "truncate"}}}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("train/kl", KL, "algo.kl.where"),
    ("train/kl", REWARD_KL, "algo.kl.where"),
    ("train/kl_loss", KL, "algo.kl.where to loss"),
    ("train/value_loss", GAE, "algo.advantage to gae"),
    ("train/value_grad_norm", GAE, "algo.advantage to gae"),
    ("train/teacher_kl", TEACHER, "algo.opd_coef above 0"),
    ("train/optimizer_steps", {"data": {"global_batch_size": 64}}, "data.global_batch_size below"),
    ("rollout/staleness_max", STALE, "rollout.max_staleness above 0"),
    ("rollout/dropped_stale", STALE, "rollout.max_staleness above 0"),
    ("mismatch/rejected_frac", STALE, "algo.correction.mode"),
    ("mismatch/support_mass_min", {"rollout": {"top_p": 0.9}}, "rollout.top_p below 1"),
]


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate_json(json.dumps({"name": "r", **sections}))


@pytest.mark.parametrize(("name", "sections", "option"), CASES)
def test_a_bound_needs_the_option_that_makes_the_metric(name: str, sections: dict[str, Any], option: str) -> None:
    for bound in ({"expect": {name: {"max": 1}}}, {"quant": {"gates": [{"name": name, "max_abs": 1}]}}):
        ((message, fix),) = objections(recipe(**bound))
        assert f": no step of this recipe reports {name}" in message
        assert f"or set {option}" in fix
        assert list(objections(recipe(**sections, **bound))) == []


def test_each_side_of_a_choice_lacks_what_the_other_reports() -> None:
    assert set(unmeasured(recipe())) - METRICS == {"eval/held_out/loss"}
    given = set(unmeasured(recipe(algo={"loss": "sft"})))
    assert {"rollout/reward_mean", "mismatch/k3", "train/steps_without_gradient"} <= given
    assert not {"train/loss", "rollout/tokens_per_s", "data/examples", "eval/held_out/loss"} & given
    assert {"rollout/waves", "rollout/surplus_groups"} <= set(unmeasured(recipe(**STALE)))
    assert "train/kl_loss" in unmeasured(recipe(**REWARD_KL))
    assert "mismatch/support_mass_min" in unmeasured(recipe(rollout={"top_p": 0.9}, algo={"support_log_probs": "off"}))


@pytest.mark.parametrize("name", ["train/nonfinite_tokens", "rollout/refused/zero_std"])
def test_counts_that_appear_when_there_are_some_are_for_expectations(name: str) -> None:
    ((message, fix),) = objections(recipe(quant={"gates": [{"name": name, "max": 0}]}))
    assert "only when there are some" in message
    assert fix == "remove the gate"
    assert list(objections(recipe(expect={name: {"max": 0}}))) == []
