"""Every recipe variant of the quickstart reaches its expected reward on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=300, suite="stage-b-cpu", nightly=True, timeout=1800)

# The one with SGLang needs another environment: tests/e2e/cpu_sglang trains it.
FOUND = Path(__file__).resolve().parents[2].glob("recipes/quickstart*.yaml")
RECIPES = sorted(path.name for path in FOUND if path.name != "quickstart_sglang.yaml")
RECIPES.append("calculator.yaml")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_reaches_its_expected_reward(runs, recipe):
    done = runs.run("learns", recipe=f"recipes/{recipe}")
    assert done.returncode == 0, done.stderr
    rewards = [row["rollout/reward_mean"] for row in runs.rows("learns")]
    print(done.stdout.strip().splitlines()[-1])
    assert rewards[0] <= 0.2
    assert sum(rewards[-5:]) / 5 >= 0.9
