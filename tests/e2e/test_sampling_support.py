"""Top-p sampling: log-probs on the sampler's support leave no mass term in the importance ratio; without them it shows."""

from __future__ import annotations

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=25, suite="stage-b-cpu")

OPTIONS = ("rollout.top_p=0.9", "run.steps=1", "eval.sets=[]", "observe.trackers=[]", "expect={}")


def test_ratio_at_step_0_is_one_on_the_support_and_not_without_it(runs):
    weights = {}
    for choice in ("auto", "off"):
        done = runs.run(choice, *OPTIONS, f"algo.support_log_probs={choice}")
        assert done.returncode == 0, done.stderr
        weights[choice] = runs.rows(choice)[0]
    with_support, without = weights["auto"]["mismatch/w_mean"], weights["off"]["mismatch/w_mean"]
    print(f"importance ratio at step 0: {with_support:.9f} on the support, {without:.9f} over the full vocabulary")
    assert with_support == pytest.approx(1.0, abs=1e-6)
    # Of every token, not of their mean: |ratio - 1| is at most the largest difference of log-probs.
    assert weights["auto"]["mismatch/abs_diff_max"] <= 1e-6
    # What is missing is the mass that top-p keeps: the nucleus of this step.
    assert without == pytest.approx(weights["auto"]["mismatch/support_mass_mean"], abs=1e-3)
    assert abs(without - 1.0) > 0.01
