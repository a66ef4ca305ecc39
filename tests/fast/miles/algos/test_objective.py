from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig, ValueConfig
from miles.algos.metrics import MetricSums
from miles.algos.objective import NonFiniteError, step_objective, value_objective
from miles.algos.step_batches import gather_scores, prepare_scoring, prepare_steps
from miles.data.batch_layout import BatchLayout
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors


def batches(samples, config, *, ranks=1, layout="thd", tokens=1000):
    schedule = ScheduleConfig(data_parallel=ranks, max_tokens_per_gpu=tokens, layout=BatchLayout(layout))
    step = prepare_steps(samples, config, schedule).steps[0]
    return [to_tensors(mb) for rank in step.ranks for mb in rank]


def policy_of(samples):
    """New log-probs per sample: what a model would say, different from old ones."""
    rng = np.random.default_rng(9)
    return {
        s.sample_id: torch.from_numpy(s.old_log_probs + rng.normal(0, 0.15, s.response_length).astype(np.float32))
        for s in samples
    }


def log_probs_for(batch, policy):
    rows = [
        policy[batch.sample_ids[s]][j] if batch.sample_ids[s] in policy else torch.tensor(-1.0)
        for s, j in zip(batch.sequence.tolist(), batch.response_index.tolist(), strict=True)
    ]
    return torch.stack(rows).clone().requires_grad_(True)


def run(samples, config, **options):
    policy = policy_of(samples)
    loss, sums = 0.0, None
    for batch in batches(samples, config, **options):
        log_probs = log_probs_for(batch, policy)
        value, parts = step_objective(log_probs, batch, config, entropy=torch.full_like(log_probs, 0.5))
        loss += value.item()
        sums = parts if sums is None else sums + parts
    assert sums is not None
    return loss, sums.finish()


@pytest.mark.parametrize("reduction", ["rollout_mean", "token_mean", "fixed"])
def test_the_loss_of_a_step_does_not_depend_on_ranks_micro_batches_or_layout(make_samples, reduction):
    config = AlgoConfig(
        reduction=reduction,
        fixed_length=9 if reduction == "fixed" else None,
        kl=KLConfig(where="loss", estimator="k2", coef=0.3),
        correction=CorrectionConfig(mode="mask", hi=1.3, veto=1e-3),
        entropy_coef=0.01,
    )
    samples = make_samples(9, seed=4)
    samples[3].loss_mask[:] = 0
    expected, metrics = run(samples, config)
    for options in ({"ranks": 2}, {"ranks": 3, "tokens": 16}, {"layout": "bshd", "tokens": 24}):
        loss, others = run(samples, config, **options)
        # Terms of order one cancel to 3e-4 here: the tolerance is absolute.
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert others.keys() == metrics.keys()
        for key, value in metrics.items():
            assert others[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_rollout_mean_by_hand(make_samples):
    samples = make_samples(6, seed=1)
    config = AlgoConfig()
    batch = batches(samples, config)[0]
    log_probs = log_probs_for(batch, policy_of(samples))
    loss, sums = step_objective(log_probs, batch, config)
    ratio = (log_probs - batch.old_log_probs).exp()
    per_token = torch.maximum(-ratio * batch.advantages, -ratio.clamp(0.8, 1.2) * batch.advantages)
    means = []
    for s in range(6):
        here = batch.sequence == s
        if batch.mask[here].any():
            means.append((per_token * batch.mask)[here].sum() / batch.mask[here].sum())
    torch.testing.assert_close(loss, torch.stack(means).mean())
    metrics = sums.finish()
    m = batch.mask
    assert metrics["train/ratio_mean"] == pytest.approx(float(ratio.detach()[m].mean()), rel=1e-5)
    d = (log_probs - batch.old_log_probs)[m].detach()
    assert metrics["train/ppo_kl"] == pytest.approx(float(-d.mean()), rel=1e-4)
    assert metrics["train/approx_kl"] == pytest.approx(float((torch.exp(-d) - 1 + d).mean()), rel=1e-4)
    gap = (batch.old_log_probs - batch.rollout_log_probs)[m]
    assert metrics["mismatch/abs_diff_mean"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert metrics["mismatch/abs_diff_max"] == pytest.approx(float(gap.abs().max()), rel=1e-5)
    assert metrics["mismatch/w_mean"] == pytest.approx(float(gap.exp().mean()), rel=1e-5)
    assert metrics["mismatch/w_p99"] == pytest.approx(float(gap.exp().max()), rel=0.02)


def test_effective_sample_size_by_hand(make_samples):
    samples = make_samples(6, seed=1)
    config = AlgoConfig()
    batch = batches(samples, config)[0]
    log_probs = log_probs_for(batch, policy_of(samples))
    _, sums = step_objective(log_probs, batch, config)
    w = (log_probs - batch.rollout_log_probs).exp().detach()
    shares = []
    for s in range(6):
        here = (batch.sequence == s) & batch.mask
        if here.any():
            shares.append(float(w[here].sum() ** 2 / (here.sum() * (w[here] ** 2).sum())))
    assert sums.finish()["train/ess"] == pytest.approx(np.mean(shares), rel=1e-5)


def test_without_old_log_probs_the_step_is_on_policy(make_samples):
    samples = make_samples(6)
    for sample in samples:
        sample.old_log_probs = None
    config = AlgoConfig(eps_clip=0.01)
    batch = batches(samples, config)[0]
    log_probs = torch.randn(len(batch.target_ids), requires_grad=True)
    loss, sums = step_objective(log_probs, batch, config)
    (grad,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(grad, -batch.advantages * batch.weights)
    assert sums.finish()["train/ratio_mean"] == 1.0


def test_bypass_takes_the_rollout_s_log_probs_as_old(make_samples):
    samples = make_samples(6)
    config = AlgoConfig(correction=CorrectionConfig(bypass=True))
    batch = batches(samples, config)[0]
    _, sums = step_objective(batch.rollout_log_probs.clone().requires_grad_(True), batch, config)
    assert sums.finish()["train/ratio_mean"] == 1.0
    assert sums.finish()["mismatch/abs_diff_max"] == 0.0


def test_distance_to_the_teacher_is_reported(make_samples):
    batch = batches(make_samples(5), AlgoConfig())[0]
    _, sums = step_objective(batch.old_log_probs.clone().requires_grad_(True), batch, AlgoConfig(opd_coef=0.5))
    expected = (batch.old_log_probs - batch.teacher_log_probs)[batch.mask].mean()
    assert sums.finish()["train/teacher_kl"] == pytest.approx(float(expected), rel=1e-5)


def test_distillation_lowers_the_advantage_where_the_teacher_disagrees(make_samples):
    samples = make_samples(6)
    config = AlgoConfig(opd_coef=0.5, eps_clip=0.9, eps_clip_high=50.0)
    batch = batches(samples, config)[0]
    log_probs = batch.old_log_probs.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(step_objective(log_probs, batch, config)[0], log_probs)
    advantages = batch.advantages - 0.5 * (batch.old_log_probs - batch.teacher_log_probs)
    torch.testing.assert_close(grad, -advantages * batch.weights)


@pytest.mark.parametrize(
    ("field", "config", "message"),
    [
        ("rollout_log_probs", AlgoConfig(correction=CorrectionConfig(bypass=True)), r"bypass uses the rollout's"),
        (
            "rollout_log_probs",
            AlgoConfig(correction=CorrectionConfig(mode="truncate")),
            r"mode truncate.*an engine that",
        ),
        ("ref_log_probs", AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=1.0)), "needs ref_log_probs"),
        ("teacher_log_probs", AlgoConfig(opd_coef=1.0), "no teacher_log_probs"),
        (
            "ref_log_probs",
            AlgoConfig(kl=KLConfig(where="loss", estimator="support_exact", coef=1.0)),
            "scores supports",
        ),
        ("values", AlgoConfig(entropy_coef=0.1), "the backend computed no entropy"),
    ],
)
def test_a_missing_field_names_the_option_and_the_remedy(make_samples, field, config, message):
    samples = make_samples(3)
    for sample in samples:
        setattr(sample, field, None)
    batch = batches(samples, config)[0]
    with pytest.raises(ValueError, match=message):
        step_objective(torch.zeros(len(batch.target_ids), requires_grad=True), batch, config)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_active_token_raises_with_sample_and_index(make_samples, bad):
    samples = make_samples(3)
    samples[1].loss_mask[:] = 1
    batch = batches(samples, AlgoConfig())[0]
    at = int(torch.nonzero(torch.tensor([batch.sample_ids[s] == "s1" for s in batch.sequence]))[0])
    log_probs = batch.old_log_probs.clone()
    log_probs[at] = bad
    with pytest.raises(NonFiniteError, match=r"sample 's1', response index 0: log-prob (nan|inf|-inf)"):
        step_objective(log_probs.requires_grad_(True), batch, AlgoConfig())


@pytest.mark.parametrize(
    ("field", "config", "name"),
    [
        ("rollout_log_probs", {"correction": CorrectionConfig(mode="truncate")}, "rollout log-prob"),
        ("ref_log_probs", {"kl": KLConfig(where="loss", estimator="k2", coef=0.1)}, "reference log-prob"),
        ("teacher_log_probs", {"opd_coef": 0.5}, "teacher log-prob"),
    ],
)
def test_a_non_finite_score_that_the_loss_reads_is_named_or_skips_the_step(make_samples, field, config, name):
    samples = make_samples(3)
    samples[2].loss_mask[:] = 1
    getattr(samples[2], field)[0] = math.nan
    batch = batches(samples, AlgoConfig())[0]
    log_probs = batch.old_log_probs.clone().requires_grad_(True)
    with pytest.raises(NonFiniteError, match=f"sample 's2', response index 0: .*{name} nan"):
        step_objective(log_probs, batch, AlgoConfig(**config))
    loss, sums = step_objective(log_probs, batch, AlgoConfig(nonfinite="skip_step", **config))
    assert sums.nonfinite_tokens == 1
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert torch.isfinite(grad).all()
    # A score that nothing reads may be anything.
    loss, sums = step_objective(log_probs, batch, AlgoConfig())
    assert torch.isfinite(loss)
    assert sums.nonfinite_tokens == 0


def test_skip_step_reports_the_tokens_and_keeps_the_gradient_finite(make_samples):
    config = AlgoConfig(nonfinite="skip_step")
    batch = batches(make_samples(3), config)[0]
    log_probs = batch.old_log_probs.clone()
    at = int(batch.mask.nonzero()[0])
    log_probs[at] = math.nan
    log_probs.requires_grad_(True)
    loss, sums = step_objective(log_probs, batch, config)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert sums.nonfinite_tokens == 1
    assert sums.finish()["train/nonfinite_tokens"] == 1.0


def test_non_finite_masked_tokens_are_ignored(make_samples):
    samples = make_samples(3)
    for sample in samples:
        sample.loss_mask[0] = 0
    batch = batches(samples, AlgoConfig())[0]
    log_probs = torch.where(batch.mask, batch.old_log_probs, math.nan).requires_grad_(True)
    loss, _ = step_objective(log_probs, batch, AlgoConfig())
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_rejection_changes_weights_but_no_denominator(make_samples):
    samples = make_samples(6)
    plain, strict = AlgoConfig(), AlgoConfig(correction=CorrectionConfig(mode="mask", hi=1.0001))
    weights = [batches(samples, config)[0].weights for config in (plain, strict)]
    assert torch.equal(*weights)
    _, metrics = run(samples, strict)
    assert metrics["mismatch/rejected_frac"] > 0.9
    assert abs(metrics["train/pg_loss"]) < abs(run(samples, plain)[1]["train/pg_loss"])


def test_a_dummy_micro_batch_gives_zero_loss_and_zero_gradient(make_samples):
    config = AlgoConfig(loss="gspo", kl=KLConfig(where="loss", estimator="k3", coef=1.0))
    dummies = [b for b in batches(make_samples(1), config, ranks=3) if b.sample_ids == ("dummy",)]
    assert len(dummies) == 2
    log_probs = torch.full((1,), -3.0, requires_grad=True)
    loss, sums = step_objective(log_probs, dummies[0], config)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert loss == grad == 0.0
    assert sums.finish()["train/loss"] == 0.0


def test_an_empty_slice_gives_a_loss_in_the_graph():
    from miles.algos.context import ContiguousAllGather, localize
    from miles.data.sample import Sample, Status

    samples = [
        Sample(f"s{i}", 0, i, np.arange(10, dtype=np.int64), 8, reward=float(i), status=Status.COMPLETED)
        for i in range(2)
    ]
    step = prepare_steps(samples, AlgoConfig(loss="gspo"), ScheduleConfig(layout=BatchLayout("bshd"))).steps[0]
    empty = to_tensors(localize(step.ranks[0][0], ContiguousAllGather(2, 0)).micro_batch)
    assert len(empty.target_ids) == 0
    log_probs = torch.zeros(0, requires_grad=True)
    loss, sums = step_objective(log_probs * 1.0, empty, AlgoConfig(loss="gspo"), entropy=torch.zeros(0))
    loss.backward()
    assert log_probs.grad is not None
    assert (sums + MetricSums.zeros()).finish()["train/loss"] == 0.0


def test_the_critic_s_objective_is_weighted_like_the_policy_s(make_samples):
    samples = make_samples(6)
    # The critic's own bound, not the policy's.
    config = AlgoConfig(advantage="gae", eps_clip=0.2, value=ValueConfig(eps_clip=0.3))
    batch = batches(samples, config)[0]
    values = torch.randn(len(batch.target_ids), requires_grad=True)
    loss, sums = value_objective(values, batch, config)
    clipped = torch.clamp(values, batch.values - 0.3, batch.values + 0.3)
    per_token = 0.5 * torch.maximum((values - batch.returns) ** 2, (clipped - batch.returns) ** 2)
    torch.testing.assert_close(loss, (per_token * batch.weights).sum())
    assert sums.finish() == {"train/value_loss": pytest.approx(loss.item())}
    with pytest.raises(ValueError, match="old values and returns"):
        value_objective(values, replace(batch, returns=None), config)


def test_scores_return_to_the_order_of_the_samples(make_samples):
    samples = make_samples(7)
    batch = prepare_scoring(samples, ScheduleConfig(data_parallel=3, max_tokens_per_gpu=20))
    scores = [
        [
            np.full(samples[i].response_length if i >= 0 else 1, float(i), dtype=np.float32)
            for mb in rank
            for i in mb.sample_index
        ]
        for rank in batch.ranks
    ]
    out = gather_scores(batch, scores, 7)
    assert [float(x[0]) for x in out] == list(range(7))
    assert [len(x) for x in out] == [s.response_length for s in samples]
    with pytest.raises(ValueError, match="rank 0 scored 0 sequences"):
        gather_scores(batch, [[], *scores[1:]], 7)


def test_steps_of_a_global_batch_have_their_own_denominators(make_samples):
    samples = make_samples(6)
    prepared = prepare_steps(samples, AlgoConfig(), ScheduleConfig(global_batch_size=2))
    assert [step.denominators.rollouts for step in prepared.steps] == [2, 2, 2]
    assert prepared.trained == [(0, 1), (2, 3), (4, 5)]
    for step, members in zip(prepared.steps, prepared.trained, strict=True):
        assert step.denominators.tokens == sum(int(samples[i].loss_mask.sum()) for i in members)


def test_the_99th_percentile_of_weights_is_of_trained_tokens_to_one_percent(make_samples):
    samples = make_samples(60)
    for sample in samples:
        sample.old_log_probs = sample.rollout_log_probs + np.float32(np.log(4.0))
        sample.loss_mask[:] = 0
    samples[0].loss_mask[0] = 1
    samples[1].loss_mask[0] = 1
    everything = prepare_scoring(samples, ScheduleConfig(max_tokens_per_gpu=10_000)).ranks[0][0]
    batch = to_tensors(everything)
    assert int((~batch.mask).sum()) >= 200
    _, sums = step_objective(batch.old_log_probs.clone().requires_grad_(True), batch, AlgoConfig())
    assert sums.finish()["mismatch/w_p99"] == pytest.approx(4.0, rel=0.006)


def test_the_smallest_support_mass_is_that_of_the_batches_that_have_one(make_samples):
    (batch,) = batches(make_samples(4), AlgoConfig())[:1]
    mass = torch.full((len(batch.mask),), 0.75)
    mass[batch.mask.nonzero()[0]] = 0.25
    log_probs = batch.old_log_probs.clone().requires_grad_(True)
    _, sums = step_objective(log_probs, batch, AlgoConfig(), support_mass=mass)
    total = MetricSums.zeros() + sums
    assert total.finish()["mismatch/support_mass_min"] == 0.25
