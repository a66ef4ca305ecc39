"""Numbers of a set against hand-made samples, and names that the list of metrics has."""

from __future__ import annotations

import re

import numpy as np
import pytest

from miles.config.metric_names import SET_NAME, is_evaluated
from miles.config.metric_table import EVALUATION
from miles.data.sample import Sample, Status
from miles.evaluate.config import EvalConfig, EvalSet
from miles.evaluate.summary import metric_names, said, summarise
from miles.rollout.errors import RolloutError

FOUR = EvalSet(name="math", samples_per_prompt=4, temperature=1.0)


def sample(group: int, rollout: int, *, reward: float | None, length: int, status: Status = Status.COMPLETED) -> Sample:
    tokens = np.arange(2 + length, dtype=np.int64)
    return Sample(
        sample_id=f"{group}-{rollout}",
        group_id=group,
        rollout_id=rollout,
        tokens=tokens,
        prompt_length=2,
        reward=reward,
        status=status,
    )


def group(number: int, rewards: list[float | None], *, cut: int = 0, length: int = 3) -> list[Sample]:
    return [
        sample(
            number,
            4 * number + index,
            reward=reward,
            length=length,
            status=Status.TRUNCATED if index < cut else Status.COMPLETED,
        )
        for index, reward in enumerate(rewards)
    ]


def test_numbers_of_two_prompts() -> None:
    found = summarise(FOUR, [group(0, [1.0, 0.0, 0.5, 0.0], cut=2), group(1, [0.0, 0.0, None, 0.25], length=5)])
    assert found == {
        "eval/math/reward_mean": pytest.approx(1.75 / 8),
        "eval/math/pass_at_1": pytest.approx(1 / 8),
        # One of four solved: half of the pairs have it.
        "eval/math/pass_at_2": pytest.approx(1 / 4),
        "eval/math/pass_at_4": pytest.approx(1 / 2),
        # 1 in three pairs, 0.5 in two, 0 in one; 0.25 in three.
        "eval/math/best_of_2": pytest.approx(((3 * 1.0 + 2 * 0.5) / 6 + 3 * 0.25 / 6) / 2),
        "eval/math/best_of_4": pytest.approx((1.0 + 0.25) / 2),
        "eval/math/response_length_mean": 4.0,
        "eval/math/truncated_frac": 0.25,
        "eval/math/unjudged_frac": 0.125,
        "eval/math/prompts": 2.0,
    }


def test_solved_is_a_reward_of_at_least_solved_at() -> None:
    half = FOUR.model_copy(update={"solved_at": 0.5})
    assert summarise(half, [group(0, [0.5, 0.49, 0.0, 0.0])])["eval/math/pass_at_1"] == 0.25


def test_segments_of_one_rollout_count_once() -> None:
    one = EvalSet(name="turns")
    segments = [sample(0, 0, reward=1.0, length=3), sample(0, 0, reward=1.0, length=4, status=Status.TRUNCATED)]
    found = summarise(one, [segments])
    assert (found["eval/turns/response_length_mean"], found["eval/turns/truncated_frac"]) == (7.0, 1.0)


def test_a_generate_function_that_loses_samples_is_told() -> None:
    with pytest.raises(RolloutError, match="a prompt has 3 rollouts, asked were 4"):
        summarise(FOUR, [group(0, [1.0, 0.0, 0.0])])


@pytest.mark.parametrize("samples", [1, 2, 6])
def test_the_names_of_a_set_are_those_of_the_list_of_metrics(samples: int) -> None:
    chosen = EvalSet(name="a-b.c_1", samples_per_prompt=samples, temperature=1.0)
    rewards = [0.0] * samples
    reported = set(summarise(chosen, [[sample(0, i, reward=r, length=1) for i, r in enumerate(rewards)]]))
    assert reported == set(metric_names(chosen))
    assert [name for name in reported if not is_evaluated(name)] == []
    shapes = {re.sub(r"\d+$", "<k>", name).replace("a-b.c_1", "<set>") for name in reported}
    listed = {metric.name for metric in EVALUATION if metric.name.startswith("eval/<set>")}
    assert shapes == (listed if samples > 1 else listed - {"eval/<set>/best_of_<k>"})
    assert re.fullmatch(SET_NAME, EvalConfig().sets[0].name)


def test_the_line_for_a_person_names_the_mean_and_the_largest_k_of_each_set() -> None:
    metrics = summarise(FOUR, [group(0, [1.0, 0.0, 0.0, 0.0])]) | summarise(
        EvalSet(name="a"), [[sample(0, 0, reward=0.5, length=1)]]
    )
    assert said(metrics) == "math reward 0.250 pass@4 1.000, a reward 0.500 pass@1 0.000"
