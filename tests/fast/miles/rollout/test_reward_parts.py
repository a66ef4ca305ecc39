"""Parts of a reward are metrics of the step, and names that bounds may use."""

from __future__ import annotations

import numpy as np

from miles.config.metric_names import fault, signed
from miles.data.sample import Sample, Status
from miles.rollout.metrics import rollout_metrics


def sample(number: int, reward: float | None, parts: dict[str, float]) -> Sample:
    tokens = np.array([2, 3])
    return Sample(f"s{number}", 0, number, tokens, 1, reward=reward, reward_parts=parts, status=Status.COMPLETED)


def test_each_part_is_the_mean_over_the_samples_that_have_it():
    group = [sample(0, 1.0, {"format": 1.0, "length": -2.0}), sample(1, 0.0, {"format": 0.0}), sample(2, None, {})]
    metrics = rollout_metrics([group], [])
    assert metrics["rollout/reward/format"] == 0.5
    assert metrics["rollout/reward/length"] == -2.0
    assert metrics["rollout/reward_mean"] == 0.5


def test_refused_groups_give_no_parts():
    metrics = rollout_metrics([[sample(0, 1.0, {})]], [sample(1, 0.0, {"format": 1.0})])
    assert not [name for name in metrics if name.startswith("rollout/reward/")]


def test_a_part_is_a_metric_that_may_be_negative():
    assert fault("rollout/reward/format") is None
    assert signed("rollout/reward/format") is True
    assert fault("rollout/reward/") is not None
    assert signed("rollout/refused/zero_std") is False
