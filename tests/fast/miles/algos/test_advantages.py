from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algos.advantages.gae import gae
from miles.algos.advantages.grpo import grpo
from miles.algos.advantages.reinforce_pp import reinforce_pp
from miles.algos.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from miles.algos.advantages.rloo import rloo
from miles.algos.advantages.token_returns import token_rewards
from miles.algos.advantages.whiten import whiten
from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig
from miles.algos.step_batches import count_for, estimate_advantages, prepare_steps
from miles.data.schedule import ScheduleConfig

ESTIMATORS = ("grpo", "rloo", "gae", "reinforce_pp", "reinforce_pp_baseline")
ONE_GROUP = np.zeros(4, dtype=np.int64)
ALL = np.ones(4, dtype=bool)


def configured(advantage: str) -> AlgoConfig:
    kl = KLConfig() if advantage in ("grpo", "rloo") else KLConfig(where="reward", estimator="k1", coef=0.1)
    discounts = {"gae": {"gamma": 0.9, "gae_lambda": 0.8}, "reinforce_pp": {"gamma": 0.9}}.get(advantage, {})
    return AlgoConfig(advantage=advantage, kl=kl, **discounts)


def test_grpo_by_hand():
    rewards = np.array([1.0, 0.0, 0.5, 0.5])
    std = np.sqrt(2 * 0.25 / 3)
    np.testing.assert_allclose(grpo(rewards, ONE_GROUP, ALL), (rewards - 0.5) / (std + 1e-6), rtol=1e-6, atol=0)
    np.testing.assert_allclose(grpo(rewards, ONE_GROUP, ALL, normalize_std=False), rewards - 0.5)


def test_rloo_by_hand():
    rewards = np.array([1.0, 0.0, 0.5, 0.1])
    expected = [r - (rewards.sum() - r) / 3 for r in rewards]
    np.testing.assert_allclose(rloo(rewards, ONE_GROUP, ALL), expected, rtol=1e-6)


def test_rollouts_outside_the_baseline_move_nobody():
    rewards = np.array([1.0, 0.0, np.nan, 7.0])
    baseline = np.array([True, True, False, False])
    for estimator in (grpo, rloo):
        with_others = estimator(rewards, ONE_GROUP, baseline)
        alone = estimator(rewards[:2], ONE_GROUP[:2], ALL[:2])
        np.testing.assert_array_equal(with_others, [*alone, 0.0, 0.0])


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_group_of_one_and_equal_rewards_are_zero(estimator):
    groups = np.array([0, 1, 1, 2, 2])
    rewards = np.array([5.0, 0.3, 0.3 + 1e-9, 1.0, 0.0])
    out = estimator(rewards, groups, np.ones(5, dtype=bool))
    assert out[:3].tolist() == [0.0, 0.0, 0.0]
    assert out[3] > 0 > out[4]


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_variance_1e6_equal_values(estimator):
    assert estimator(np.full(4, 1e6), ONE_GROUP, ALL).tolist() == [0.0] * 4
    ramp = 1e6 + np.array([0.0, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(estimator(ramp, ONE_GROUP, ALL), estimator(ramp - 1e6, ONE_GROUP, ALL), rtol=1e-6)


def test_whitening_of_equal_large_values_stays_near_zero():
    for value in (1e6, 123456.78, -1e6):
        out = whiten(torch.full((1000,), value), torch.ones(1000))
        assert torch.isfinite(out).all()
        assert float(out.abs().max()) <= 1e-4


def test_reinforce_pp_tells_large_rewards_apart_that_differ_little(make_samples):
    samples = make_samples(1000, group_size=1, longest=1)
    for number, sample in enumerate(samples):
        sample.loss_mask = np.ones_like(sample.loss_mask)
        sample.reward = 1e6 + (1e-3 if number % 2 else -1e-3)
    config = AlgoConfig(advantage="reinforce_pp")
    out = np.concatenate(estimate_advantages(samples, count_for(samples, config), config).advantages)
    assert out.dtype == np.float32
    # 1e-8 beside a variance of 1e-6.
    np.testing.assert_allclose(out, np.where(np.arange(1000) % 2, 1.0, -1.0) / np.sqrt(1.01), rtol=2e-3)


def test_whitening_of_nothing_or_one_value_is_zero():
    assert whiten(torch.tensor([3.0, 4.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0, 4.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.zeros(0), torch.zeros(0)).shape == (0,)


def loop_gae(rewards, values, mask, gamma, lam):
    """Textbook recursion over the trainable tokens of one sequence."""
    steps = [t for t in range(len(mask)) if mask[t]]
    out, following_value, following = np.zeros(len(mask)), 0.0, 0.0
    for t in reversed(steps):
        delta = rewards[t] + gamma * following_value - values[t]
        following = out[t] = delta + gamma * lam * following
        following_value = values[t]
    return out


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.booleans(), min_size=0, max_size=7), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_gae_equals_the_textbook_recursion_on_trainable_tokens(masks, gamma, lam, seed):
    rng = np.random.default_rng(seed)
    lengths = np.array([len(m) for m in masks])
    mask = np.array([x for m in masks for x in m], dtype=np.uint8)
    rewards, values = rng.standard_normal((2, len(mask)))
    rewards = np.where(mask, rewards, 0.0)
    out, returns = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam)
    ends = np.cumsum(lengths)
    expected = [
        loop_gae(rewards[e - n : e], values[e - n : e], mask[e - n : e], gamma, lam)
        for e, n in zip(ends, lengths, strict=True)
    ]
    flat = np.concatenate(expected)
    np.testing.assert_allclose(out, flat, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, flat + values, 0.0), rtol=1e-5, atol=1e-5)


def test_the_reward_lands_on_the_last_trainable_token():
    mask = np.array([1, 1, 0, 0, 0, 1, 0, 1], dtype=np.uint8)
    lengths = np.array([3, 2, 3])
    kl = np.full(8, 2.0)
    out = token_rewards(np.array([10.0, 20.0, 30.0]), mask, lengths, kl, 0.5)
    # The second sequence has no trainable token: its reward goes nowhere.
    assert out.tolist() == [-1.0, 9.0, 0.0, 0.0, 0.0, -1.0, 0.0, 29.0]


def test_reinforce_pp_by_hand():
    rewards = np.array([0.0, 0.0, 1.0, 0.0, 2.0])
    mask = np.array([1, 0, 1, 1, 1], dtype=np.uint8)
    out = reinforce_pp(rewards, mask, np.array([3, 2]), gamma=0.5)
    assert out.tolist() == [0.5, 0.0, 1.0, 1.0, 2.0]


def test_reinforce_pp_baseline_subtracts_the_group_mean_and_the_kl():
    out = reinforce_pp_baseline(
        np.array([1.0, 0.0]), np.zeros(2, dtype=int), np.ones(2, dtype=bool), np.array([0, 1]),
        np.array([1, 1, 1, 0], dtype=np.uint8), np.array([2, 2]), np.array([1.0, 2.0, 3.0, 4.0]), 0.1,
    )  # fmt: skip
    np.testing.assert_allclose(out, [0.4, 0.3, -0.8, 0.0], rtol=1e-6)


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_fully_masked_sample_in_every_estimator(make_samples, advantage):
    samples = make_samples(6)
    for index in (1, 4):
        samples[index].loss_mask[:] = 0
    config = configured(advantage)
    counted = count_for(samples, config)
    out = estimate_advantages(samples, counted, config)
    assert all(np.isfinite(a).all() and a.dtype == np.float32 for a in out.advantages)
    if advantage not in ("grpo", "rloo"):  # those give the rollout's advantage to every token; its weight is 0
        assert not out.advantages[1].any()
        assert not out.advantages[4].any()
    batch = prepare_steps(samples, config, ScheduleConfig()).steps[0]
    assert batch.denominators.rollouts == 4
    everything_masked = make_samples(3)
    for sample in everything_masked:
        sample.loss_mask[:] = 0
    prepared = prepare_steps(everything_masked, config, ScheduleConfig(data_parallel=2))
    assert all(prepared.steps[0].for_rank(rank).skip for rank in (0, 1))


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_inputs_not_mutated(make_samples, advantage):
    samples = make_samples(6)
    before = copy.deepcopy(samples)
    prepare_steps(samples, configured(advantage), ScheduleConfig())
    for old, new in zip(before, samples, strict=True):
        for name in type(old).__slots__:
            left, right = getattr(old, name), getattr(new, name)
            np.testing.assert_array_equal(left, right) if isinstance(left, np.ndarray) else None
            assert isinstance(left, np.ndarray) or left == right


def test_kl_in_the_reward_is_of_the_old_policy_or_of_the_rollout_s_under_bypass(make_samples):
    for bypass, field in ((False, "old_log_probs"), (True, "rollout_log_probs")):
        samples = make_samples(6)
        kl = KLConfig(where="reward", coef=0.1)
        config = AlgoConfig(advantage="reinforce_pp", kl=kl, correction=CorrectionConfig(bypass=bypass))
        difference = [getattr(s, field) - s.ref_log_probs for s in samples]
        active = np.concatenate([d[s.loss_mask > 0] for d, s in zip(difference, samples, strict=True)])
        prepared = prepare_steps(samples, config, ScheduleConfig())
        assert prepared.metrics["train/kl"] == pytest.approx(active.mean(), rel=1e-5)
        for sample in samples:
            setattr(sample, "old_log_probs" if bypass else "rollout_log_probs", None)
        again = prepare_steps(samples, config, ScheduleConfig()).steps[0].ranks[0][0]
        np.testing.assert_array_equal(again.advantages, prepared.steps[0].ranks[0][0].advantages)


def test_siblings_share_one_advantage_and_count_once(make_samples):
    samples = make_samples(4, group_size=4)
    samples[1].rollout_id, samples[1].segment, samples[1].reward = samples[0].rollout_id, 1, samples[0].reward
    config = AlgoConfig()
    out = estimate_advantages(samples, count_for(samples, config), config).advantages
    rewards = np.array([samples[0].reward, samples[2].reward, samples[3].reward])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert out[0][0] == pytest.approx(expected[0], rel=1e-5)
    assert out[1][0] == pytest.approx(expected[0], rel=1e-5)
    assert out[3][0] == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_a_reward_that_is_not_finite_names_its_sample(make_samples, advantage, reward):
    samples = make_samples(6)
    samples[4].reward = float(reward)
    with pytest.raises(ValueError, match=rf"sample 's4' has reward {reward}; rewards must be finite"):
        prepare_steps(samples, configured(advantage), ScheduleConfig())


@pytest.mark.parametrize(("field", "advantage"), [("values", "gae"), ("ref_log_probs", "reinforce_pp")])
def test_a_missing_field_names_sample_and_remedy(make_samples, field, advantage):
    samples = make_samples(2)
    setattr(samples[1], field, None)
    with pytest.raises(ValueError, match=f"sample 's1' has no {field}: .*(critic|Backend.score)"):
        prepare_steps(samples, configured(advantage), ScheduleConfig())


def test_whiten_equals_single_process_for_dp_cp_layouts(gloo_ranks):
    """dp 2 x cp 2, nine tokens, one rank's slice empty; statistics span all four ranks."""
    values = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0, -5.0])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1])
    single = whiten(values, mask)
    for split in ([2, 2, 2, 3], [4, 0, 5, 0], [0, 0, 0, 9], [1, 6, 0, 2]):
        bounds = np.cumsum([0, *split])

        def work(rank: int, bounds=bounds) -> list[float]:
            import torch.distributed as dist

            part = slice(bounds[rank], bounds[rank + 1])
            return whiten(values[part], mask[part], group=dist.group.WORLD).tolist()

        joined = torch.tensor([x for part in gloo_ranks(4, work, limit_s=20) for x in part])
        torch.testing.assert_close(joined, single, rtol=1e-6, atol=1e-7)
