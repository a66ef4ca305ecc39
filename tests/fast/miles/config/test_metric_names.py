"""The table of metrics says which may be negative, and gates follow it for every one of them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from miles.config.metric_names import METRICS, SIGNED, signed, unregistered
from miles.config.metric_table import COLUMNS, EVALUATION, PATTERNS, REFUSED, STEP
from miles.quant.config import MetricGate


@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_one_sided_gate_is_accepted_exactly_for_metrics_that_are_never_negative(name: str) -> None:
    assert MetricGate(name=name, max_abs=1.0).is_signed is (name in SIGNED)
    if name in SIGNED:
        for said in (None, True, False):
            with pytest.raises(ValidationError, match="signed"):
                MetricGate(name=name, max=1.0, signed=said)
    else:
        assert MetricGate(name=name, max=1.0).max == 1.0


def test_rewards_and_differences_of_log_probs_may_be_negative() -> None:
    differences = {f"train/{name}" for name in ("kl", "kl_loss", "loss", "pg_loss", "ppo_kl", "teacher_kl")}
    assert {"rollout/reward_mean", "rollout/reward_mean_all"} | differences == SIGNED


def test_counts_of_filters_are_never_negative_and_of_other_names_nothing_is_known() -> None:
    assert signed(f"{REFUSED}zero_std") is False
    assert signed("custom/gap") is None
    with pytest.raises(ValidationError, match="'custom/gap': the metric is signed"):
        MetricGate(name="custom/gap", max=1.0)
    assert MetricGate(name="custom/gap", max=1.0, signed=False).is_signed is False


def test_a_row_may_hold_columns_metrics_and_names_of_users_and_nothing_else() -> None:
    row = ["step", "weight_version", "train/loss", "rollout/reward/format", "rollout/refused/zero_std"]
    row += ["eval/held_out/reward_mean", "eval/a.b-2/pass_at_16", "time/evaluate"]
    assert unregistered(row) == []
    assert unregistered(
        [*row, "train/los", "eval/reward_mean", "eval/x/pass_at_0", "eval/x/y", "steps", "rollout/reward/"]
    ) == [
        "train/los",
        "eval/reward_mean",
        "eval/x/pass_at_0",
        "eval/x/y",
        "steps",
        "rollout/reward/",
    ]


def test_every_metric_is_listed_once_with_a_unit_and_a_meaning() -> None:
    listed = [*COLUMNS, *STEP, *PATTERNS, *EVALUATION]
    assert len({metric.name for metric in listed}) == len(listed)
    assert [metric.name for metric in listed if not metric.unit or len(metric.meaning.split()) < 2] == []
    assert [metric.name for metric in listed if set("|\n") & set(metric.meaning + metric.unit + metric.when)] == []
