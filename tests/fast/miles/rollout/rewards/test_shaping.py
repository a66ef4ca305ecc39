"""What lengths add to rewards in training, against TRL's own punishment and the published formulas."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_engine import FakeEngine, FakePrompts, Letters
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from miles.data.sample import Sample, Status
from miles.rollout.async_rollout import AsyncRollout
from miles.rollout.config import RolloutConfig
from miles.rollout.groups import GroupRunner
from miles.rollout.rewards import RewardConfig, shape_rewards
from miles.rollout.rewards.shaping import length_normalised, soft_overlong_punishment
from miles.rollout.sync_rollout import SyncRollout


def answer(length: int, reward: float | None, *, rollout: int = 0, status=Status.COMPLETED, mask=None) -> Sample:
    tokens = np.arange(2 + length, dtype=np.int64)
    mask = None if mask is None else np.array(mask, dtype=np.uint8)
    return Sample(f"s{rollout}", 0, rollout, tokens, 2, reward=reward, status=status, loss_mask=mask)


def shaped(samples, *, max_new_tokens=10, **options) -> list[float | None]:
    shape_rewards(samples, RewardConfig(**options), max_new_tokens=max_new_tokens)
    return [sample.reward for sample in samples]


def test_the_punishment_is_that_of_trl():
    from trl.rewards import get_soft_overlong_punishment

    limit, buffer = 100, 20
    theirs = get_soft_overlong_punishment(max_completion_len=limit, soft_punish_cache=buffer)
    lengths = list(range(130))
    ours = [soft_overlong_punishment(length, limit=limit, buffer=buffer) for length in lengths]
    np.testing.assert_allclose(ours, theirs(completion_ids=[[1] * length for length in lengths]), rtol=1e-12)
    assert ours[80] == 0.0
    assert ours[90] == -0.5
    assert ours[100] == ours[129] == -1.0


def test_overlong_answers_lose_up_to_the_penalty_and_the_parts_say_so():
    samples = [answer(6, 1.0), answer(8, 1.0, rollout=1), answer(10, 0.0, rollout=2, status=Status.TRUNCATED)]
    samples[0].reward_parts = {"format": 1.0}
    assert shaped(samples, overlong={"buffer_tokens": 4, "penalty": 2.0}) == [1.0, 0.0, -2.0]
    assert samples[0].reward_parts == {"format": 1.0, "judged": 1.0, "overlong": 0.0}
    assert samples[2].reward_parts == {"judged": 0.0, "overlong": -2.0}


def test_lengths_are_of_what_the_policy_wrote_over_all_segments():
    tool = answer(9, 1.0, mask=[1, 1, 0, 0, 0, 0, 0, 1, 1])
    segments = [answer(4, 1.0, rollout=1), answer(4, 1.0, rollout=1)]
    assert shaped([tool, *segments], overlong={"buffer_tokens": 4}) == [1.0, 0.5, 0.5]


def test_normalised_lengths_by_hand():
    # min 2, max 10: 0.5 - (l - 2)/8
    assert length_normalised([2, 4, 10, 2], [True, True, True, False]) == [0.5, 0.25, -0.5, 0.0]
    assert length_normalised([10, 2], [False, True]) == [-0.5, 0.5]
    assert length_normalised([7, 7], [True, False]) == [0.0, 0.0]


def test_a_short_answer_is_worth_more_only_when_it_is_solved():
    samples = [answer(2, 1.0), answer(4, 1.0, rollout=1), answer(2, 0.9, rollout=2), answer(10, 0.2, rollout=3)]
    options = {"length_normalised": {"weight": 0.2}}
    assert shaped(samples, **options) == pytest.approx([1.1, 1.05, 0.9, 0.1])
    assert samples[3].reward_parts == {"judged": 0.2, "length": -0.1}


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=8))
def test_length_rewards_keep_their_bounds_and_order(group):
    lengths, solved = [length for length, _ in group], [good for _, good in group]
    values = length_normalised(lengths, solved)
    for length, good, value in zip(lengths, solved, values, strict=True):
        assert -0.5 <= value <= (0.5 if good else 0.0)
        for other, also, theirs in zip(lengths, solved, values, strict=True):
            assert not (good == also and length < other) or value >= theirs


def test_samples_without_a_reward_are_left_out_of_the_group():
    samples = [answer(2, 1.0), answer(6, 1.0, rollout=1), answer(1, None, rollout=2), answer(9, 1.0, rollout=3, status=Status.ABORTED)]  # fmt: skip
    assert shaped(samples, length_normalised={"weight": 1.0}) == [1.5, 0.5, None, 1.0]
    assert samples[2].reward_parts == {} == samples[3].reward_parts
    nothing = [answer(2, None)]
    assert shaped(nothing, length_normalised={"weight": 1.0}, overlong={"buffer_tokens": 1}) == [None]


def test_without_either_nothing_changes():
    sample = answer(10, 0.5)
    assert shaped([sample]) == [0.5]
    assert sample.reward_parts == {}


@pytest.mark.parametrize("stale", [0, 1])
def test_training_sees_shaped_rewards_and_evaluation_judged_ones(stale):
    reward = {"overlong": {"buffer_tokens": 5}}
    config = RolloutConfig(batch_groups=2, group_size=2, max_new_tokens=5, max_staleness=stale, reward=reward)

    async def run():
        prompts = FakePrompts(score=lambda *_: 1.0)
        kind = AsyncRollout if stale else SyncRollout
        rollout = kind(config, FakeEngine(), prompts, Letters(), run_seed=1)
        await rollout.start(0)
        trained = await rollout.collect(0)
        await rollout.close()
        return trained, await GroupRunner(config, FakeEngine(), prompts, Letters(), run_seed=1).run_all(
            prompts.next_groups(2)
        )

    trained, evaluated = asyncio.run(run())
    # Three of five tokens, all of them in the buffer.
    assert trained.metrics["rollout/reward_mean"] == pytest.approx(0.4)
    assert trained.metrics["rollout/reward/judged"] == 1.0
    assert trained.metrics["rollout/reward/overlong"] == pytest.approx(-0.6)
    # What an evaluation asks for.
    assert {sample.reward for group in evaluated for sample in group} == {1.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": 8, "reward": {"overlong": {"buffer_tokens": 9}}}, "buffer_tokens is 9, above rollout.max_new_tokens 8"),
        ({"group_size": 1, "reward": {"length_normalised": {"weight": 1.0}}}, "rollout.group_size is 1"),
        ({"reward": {"overlong": {"buffer_tokens": 2, "penalty": 0.0}}}, "greater than 0"),
    ],
)  # fmt: skip
def test_shaping_that_means_nothing_is_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        RolloutConfig(**options)
