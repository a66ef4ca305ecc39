"""A run from which nothing is learned says so: when, how often, with what to look at, and never for other losses."""

from __future__ import annotations

from typing import Any

import pytest

from miles.algos.config import AlgoConfig, KLConfig
from miles.orchestrate.gradient_watch import METRIC, GradientWatch, reason_without_gradient

DEAD = {"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0, "rollout/zero_std_frac": 1.0}
ALIVE = {"rollout/reward_mean": 0.5, "rollout/reward_std": 0.5, "rollout/zero_std_frac": 0.5}
# Each group has one reward, but the groups differ.
BETWEEN = {"rollout/reward_mean": 0.5, "rollout/reward_std": 0.5, "rollout/zero_std_frac": 1.0}


def row(step: int, of: dict[str, float], **more: float) -> dict[str, Any]:
    base = {"train/step_skipped": 0.0, "rollout/truncated_frac": 0.25, "rollout/reward_errors": 3.0}
    return {"step": step, **base, **of, **more}


def seen(rows: list[dict[str, Any]], *, limit: int = 10, algo: AlgoConfig | None = None, earlier: Any = ()) -> Any:
    """(steps at which it warned, texts, the metric of each row)."""
    warned: list[int] = []
    texts: list[str] = []
    step = -1

    def warn(text: str) -> None:
        warned.append(step)
        texts.append(text)

    watch = GradientWatch(algo or AlgoConfig(), limit, warn, earlier)
    counts = []
    for item in rows:
        step = item["step"]
        counts.append(watch.see(item).get(METRIC))
    return warned, texts, counts


def test_it_warns_at_the_limit_and_whenever_the_count_has_doubled() -> None:
    warned, texts, counts = seen([row(step, DEAD) for step in range(45)])
    assert warned == [9, 19, 39]
    assert counts == [float(step + 1) for step in range(45)]
    assert texts[0].startswith("10 steps in a row carried no gradient (step 9: every sample had the reward 0.000)")
    for said in ("rollout.reward (3 errors", "25% of the responses", "rollout.max_new_tokens", "data.task"):
        assert said in texts[0]


def test_one_step_that_learns_starts_the_count_again() -> None:
    rows = [row(step, ALIVE if step == 9 else DEAD) for step in range(20)]
    warned, _, counts = seen(rows)
    assert warned == [19]
    assert counts[8:11] == [9.0, 0.0, 1.0]


def test_after_a_step_that_learns_the_first_warning_comes_at_the_limit_again() -> None:
    rows = [row(step, ALIVE if step == 25 else DEAD) for step in range(40)]
    assert seen(rows)[0] == [9, 19, 35]


def test_a_resumed_run_goes_on_counting_and_does_not_repeat_itself() -> None:
    whole = seen([row(step, DEAD) for step in range(25)])
    for cut in (4, 10, 15, 20):
        earlier = [row(step, DEAD) | {METRIC: float(step + 1)} for step in range(cut)]
        rest = seen([row(step, DEAD) for step in range(cut, 25)], earlier=earlier)
        assert rest[0] == [step for step in whole[0] if step >= cut]
        assert rest[2] == whole[2][cut:]


@pytest.mark.parametrize(
    ("advantage", "dead"),
    [("grpo", True), ("rloo", True), ("reinforce_pp_baseline", True), ("reinforce_pp", False), ("gae", False)],
)
def test_groups_that_differ_teach_only_what_compares_them(advantage: Any, dead: bool) -> None:
    algo = AlgoConfig(advantage=advantage)
    assert seen([row(0, BETWEEN)], algo=algo)[2] == [float(dead)]
    assert seen([row(0, DEAD)], algo=algo)[2] == [1.0]
    assert seen([row(0, ALIVE)], algo=algo)[2] == [0.0]


@pytest.mark.parametrize("algo", [AlgoConfig(loss="sft"), AlgoConfig(opd_coef=0.5, teacher="somewhere")])
def test_losses_that_learn_without_rewards_are_not_watched(algo: AlgoConfig) -> None:
    warned, _, counts = seen([row(step, DEAD) for step in range(30)], algo=algo)
    assert (warned, counts) == ([], [None] * 30)


def test_a_penalty_alone_is_no_reward_to_learn_from() -> None:
    algo = AlgoConfig(entropy_coef=0.01, kl=KLConfig(where="loss", estimator="k2", coef=0.1))
    assert seen([row(step, DEAD) for step in range(3)], algo=algo, limit=3)[0] == [2]


def test_skipped_steps_count_with_their_reason() -> None:
    reason = lambda item: reason_without_gradient(item, within_groups=True)  # noqa: E731
    assert "every sample had the reward 0.000" in str(reason(row(0, DEAD, **{"train/step_skipped": 1.0})))
    assert reason(row(0, ALIVE, **{"train/step_skipped": 1.0})) == "skipped, no sample counted"
    broken = row(0, ALIVE, **{"train/step_skipped": 1.0, "train/nonfinite_tokens": 7.0})
    assert reason(broken) == "skipped, 7 tokens had values that are not finite"
    assert reason(row(0, ALIVE)) is None
