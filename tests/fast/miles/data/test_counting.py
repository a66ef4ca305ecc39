from __future__ import annotations

import numpy as np
import pytest

from miles.data.batch import Denominators
from miles.data.counting import count_rollouts
from miles.data.sample import Status

# (sample fields, options) -> (mask sum of 4 tokens, in N, in the group's baseline)
TABLE = {
    "normal": ({}, {}, (4, True, True)),
    "truncated, kept": ({"status": Status.TRUNCATED}, {}, (4, True, True)),
    "truncated, masked": ({"status": Status.TRUNCATED}, {"mask_truncated": True}, (0, False, True)),
    "removed by a filter": ({"removed": True}, {}, (0, False, True)),
    "aborted": ({"status": Status.ABORTED}, {}, (0, False, False)),
    "failed": ({"status": Status.FAILED}, {}, (0, False, False)),
    "environment error": ({"status": Status.ENV_ERROR}, {}, (0, False, False)),
    "no reward": ({"reward": None}, {}, (0, False, False)),
    "fully masked": ({"loss_mask": np.zeros(4, dtype=np.uint8)}, {}, (0, False, True)),
    "half masked": ({"loss_mask": np.array([1, 0, 0, 1], dtype=np.uint8)}, {}, (2, True, True)),
}


@pytest.mark.parametrize("case", TABLE)
def test_denominator_table(make_sample, case):
    fields, options, (tokens, in_step, in_baseline) = TABLE[case]
    subject = make_sample(**{"reward": 0.0, **fields})
    others = [make_sample(reward=1.0), make_sample(reward=0.5)]
    counted = count_rollouts([subject, *others], **options)
    assert int(counted.masks[0].sum()) == counted.tokens[0] == tokens
    assert bool(counted.in_step[0]) is in_step
    assert bool(counted.in_baseline[0]) is in_baseline
    assert counted.in_step[1:].all()
    assert counted.in_baseline[1:].all()


@pytest.mark.parametrize(("choice", "tokens"), [("keep", 4), ("drop", 0)])
def test_denominator_table_for_zero_variance_groups(make_sample, choice, tokens):
    equal = [make_sample(reward=0.5), make_sample(reward=0.5 + 1e-9)]
    mixed = [make_sample(reward=r, group_id=1) for r in (0.0, 1.0)]
    counted = count_rollouts([*equal, *mixed], zero_variance=choice)
    assert counted.zero_variance.tolist() == [True, False]
    assert counted.tokens.tolist() == [tokens, tokens, 4, 4]
    assert counted.in_step.tolist() == [tokens > 0, tokens > 0, True, True]


def test_masks_are_copies(make_sample):
    sample = make_sample(removed=True)
    counted = count_rollouts([sample])
    assert sample.loss_mask.tolist() == [1, 1, 1, 1]
    counted.masks[0][:] = 1
    assert not np.shares_memory(counted.masks[0], sample.loss_mask)


def test_siblings_count_once_and_share_their_tokens(make_sample):
    siblings = [make_sample(3, rollout_id=900), make_sample(5, rollout_id=900, segment=1)]
    counted = count_rollouts([*siblings, make_sample(2, reward=0.0)])
    assert counted.tokens.tolist() == [8, 2]
    assert int(counted.in_step.sum()) == 2


def test_a_failed_segment_spoils_the_whole_rollout(make_sample):
    siblings = [make_sample(rollout_id=900), make_sample(rollout_id=900, segment=1, status=Status.FAILED)]
    counted = count_rollouts(siblings)
    assert counted.tokens.tolist() == [0]
    assert not counted.in_baseline[0]


def test_a_pending_sample_is_refused(make_sample):
    with pytest.raises(ValueError, match="is pending"):
        count_rollouts([make_sample(status=Status.PENDING)])


def test_supervised_samples_need_no_reward(make_sample):
    counted = count_rollouts([make_sample(reward=None)], needs_reward=False, zero_variance="drop")
    assert counted.in_step.tolist() == [True]


def test_reductions_by_hand():
    mask = np.array([1, 1, 0, 1, 1, 1], dtype=np.uint8)
    per_rollout = np.array([2, 2, 2, 3, 3, 3])  # D_r of each token's rollout
    losses = np.array([1.0, 3.0, 100.0, 2.0, 4.0, 6.0], dtype=np.float32)
    expected = {
        "rollout_mean": (4 / 2 + 12 / 3) / 2,
        "token_mean": 16 / 5,
        "fixed": 16 / (2 * 8),
    }
    for reduction, value in expected.items():
        scalars = Denominators(2, 5, reduction, 8 if reduction == "fixed" else None)
        assert float((scalars.weights(mask, per_rollout) * losses).sum()) == pytest.approx(value, rel=1e-6)


def test_fixed_reduction_without_its_length_is_refused():
    with pytest.raises(ValueError, match=r"algo\.fixed_length"):
        Denominators(1, 1, "fixed").weights(np.ones(1), np.ones(1))


@pytest.mark.parametrize(("span", "equal"), [(0.0, True), (1e-8, True), (1.01e-8, False), (1e-7, False)])
def test_rewards_are_equal_up_to_a_span_of_1e_8_and_one_rule_serves_filter_and_advantage(make_sample, span, equal):
    from miles.algos.advantages.grpo import grpo

    samples = [make_sample(reward=reward) for reward in (0.0, span)]
    counted = count_rollouts(samples)
    assert counted.zero_variance.tolist() == [equal]
    out = grpo(counted.rewards, counted.group_index, counted.in_baseline, normalize_std=False)
    assert bool(out.any()) is not equal
