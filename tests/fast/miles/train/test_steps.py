from __future__ import annotations

import pytest

from miles.train.steps import merge_steps


def row(**values: float) -> dict[str, float]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"train/step_skipped": 0.0, "train/loss": 1.0, **named}


def test_one_step_is_reported_as_it_is():
    only = row(train__grad_norm=0.1)
    assert merge_steps([only]) == only


def test_means_over_the_steps_that_changed_the_weights_with_extremes_and_the_last_rate():
    steps = [
        row(train__loss=1.0, mismatch__abs_diff_max=0.5, mismatch__support_mass_min=0.9, train__lr=0.1),
        {"train/step_skipped": 1.0},
        row(train__loss=3.0, mismatch__abs_diff_max=0.2, mismatch__support_mass_min=0.8, train__lr=0.2),
    ]
    assert merge_steps(steps) == {
        "train/step_skipped": 0.0,
        "train/loss": 2.0,
        "mismatch/abs_diff_max": 0.5,
        "mismatch/support_mass_min": 0.8,
        "train/lr": 0.2,
        "train/optimizer_steps": 2.0,
    }


def test_nothing_trained_is_a_skipped_step():
    merged = merge_steps([{"train/step_skipped": 1.0}, {"train/step_skipped": 1.0}])
    assert merged == {"train/step_skipped": 1.0, "train/optimizer_steps": 0.0}


def test_a_metric_that_some_steps_lack_is_averaged_over_the_others():
    assert merge_steps([row(train__kl=2.0), row()])["train/kl"] == pytest.approx(2.0)


def test_broken_tokens_of_a_skipped_step_are_told_when_another_trained():
    broken = {"train/step_skipped": 1.0, "train/loss": float("nan"), "train/nonfinite_tokens": 3.0}
    merged = merge_steps([row(), broken])
    assert merged == {
        "train/step_skipped": 0.0,
        "train/loss": 1.0,
        "train/nonfinite_tokens": 3.0,
        "train/optimizer_steps": 1.0,
    }
    assert merge_steps([broken, broken])["train/nonfinite_tokens"] == 6.0
