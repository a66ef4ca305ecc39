"""GRPO with a real SGLang server as its engine learns, on policy and off; what cannot work stops before Ray starts."""

from __future__ import annotations

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=700, suite="stage-b-cpu", labels=["sglang"], nightly=True, serial=True, timeout=1800)

RECIPE = "recipes/quickstart_sglang.yaml"
ASYNC = ("rollout.max_staleness=2", "algo.correction.bypass=true")
WAYS = {
    "on_policy": (),
    "async": ASYNC,
    # Fewer steps: where requests run, SGLang looks once a second whether all were aborted.
    "partial": (*ASYNC, "rollout.partial=true", "sync.pause=abort", "run.steps=120"),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_the_policy_learns(runs, sglang_python, way):
    done = runs.run("learns", f"engine.python={sglang_python}", *WAYS[way], recipe=RECIPE)
    assert done.returncode == 0, done.stderr
    # The last row is the evaluation after the last step.
    rewards = [row["rollout/reward_mean"] for row in runs.rows("learns") if "rollout/reward_mean" in row]
    assert rewards[0] <= 0.2
    assert sum(rewards[-5:]) / 5 >= 0.9
