"""Kernels in the Triton interpreter against the plain-torch reference, few and large programs."""

from __future__ import annotations

import math

import pytest
import torch

from miles.kernels.log_probs import PolicyTerm, fused_policy_loss, logits_gradient, row_stats, scale_
from miles.kernels.log_probs.ops import Tuning
from miles_ci.declare import register_cpu_ci

register_cpu_ci(30, "stage-a-cpu", nightly=True)

SMALL = Tuning(stats_warps=1, stats_depth=2, gradient_warps=1, gradient_block=1024, fused_warps=1, fused_depth=2)


def problem(dtype: torch.dtype, width: int = 1100, rows: int = 6):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, width, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, 2 * width, (rows,), generator=generator)
    return logits, targets, torch.randn(rows, generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("valid", "offset"), [(1100, 0), (983, 0), (1100, 1100), (700, 400)])
@pytest.mark.parametrize("entropy", [False, True])
def test_statistics_and_gradient_equal_the_reference(dtype, valid, offset, entropy):
    """Shards at an offset, padded columns, targets that live on another shard."""
    logits, targets, g, h = problem(dtype)
    options = {"valid": valid, "offset": offset, "temperature": 0.7}
    expected = row_stats(logits, targets, with_entropy=entropy, chunk_rows=4, **options)
    actual = row_stats(logits, targets, with_entropy=entropy, triton=True, tuning=SMALL, **options)
    torch.testing.assert_close(actual.maximum, expected.maximum, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual.target, expected.target, rtol=1e-6, atol=1e-6)
    lse = expected.maximum + expected.total.log()
    kwargs = {}
    if entropy:
        torch.testing.assert_close(actual.weighted, expected.weighted, rtol=1e-5, atol=1e-4)
        kwargs = {"entropy": lse - expected.weighted / expected.total, "grad_entropy": h}
    reference = logits_gradient(logits, targets, lse, g, chunk_rows=4, **kwargs, **options)
    gradient = logits_gradient(logits, targets, lse, g, triton=True, tuning=SMALL, **kwargs, **options)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(gradient, reference, **tolerance)
    assert not gradient[:, valid:].any()


def test_a_shard_without_a_valid_column_contributes_nothing():
    logits, targets, g, _ = problem(torch.float32, width=64)
    for triton in (False, True):
        stats = row_stats(logits, targets, valid=0, offset=10_000, with_entropy=True, triton=triton, tuning=SMALL)
        assert torch.isneginf(stats.maximum).all()
        assert not stats.total.any()
        assert not stats.target.any()
        assert not stats.weighted.any()
        grad = logits_gradient(logits, targets, g, g, valid=0, triton=triton, tuning=SMALL)
        assert not grad.any()


def test_forbidden_tokens_are_finite_in_both():
    logits, targets, g, h = problem(torch.float32)
    targets = targets % 900
    logits[:, 900:] = -math.inf
    for triton in (False, True):
        stats = row_stats(logits, targets, valid=1100, with_entropy=True, triton=triton, tuning=SMALL)
        lse = stats.maximum + stats.total.log()
        entropy = lse - stats.weighted / stats.total
        p = logits.double().softmax(-1)
        expected = -(p * torch.where(p > 0, p.log(), 0.0)).sum(-1)
        torch.testing.assert_close(entropy, expected.float(), rtol=1e-5, atol=1e-5)
        grad = logits_gradient(
            logits, targets, lse, g, entropy=entropy, grad_entropy=h, valid=1100, triton=triton, tuning=SMALL
        )
        assert torch.isfinite(grad).all()
        assert not grad[:, 900:].any()


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "cispo"])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_equals_the_reference(loss, on_policy, dtype):
    logits, targets, advantages, spread = problem(dtype)
    targets = targets % 1090
    stats = row_stats(logits, targets, valid=1090, temperature=0.8)
    log_probs = stats.target - stats.maximum - stats.total.log()
    weights = torch.tensor([0.2, 0.0, 0.1, 0.3, 0.2, 0.1])
    term = PolicyTerm(advantages * 2, weights, None if on_policy else log_probs + 0.3 * spread, loss=loss, dual_c=1.2)
    options = {"valid": 1090, "temperature": 0.8, "with_entropy": True}
    expected = fused_policy_loss(logits, targets, term, **options)
    log_p = (logits[:, :1090].double() / 0.8).log_softmax(-1)
    torch.testing.assert_close(expected.entropy, -(log_p.exp() * log_p).sum(-1).float(), rtol=1e-5, atol=1e-5)
    without = fused_policy_loss(logits, targets, term, triton=True, tuning=SMALL, valid=1090, temperature=0.8)
    assert without.entropy is None
    for inplace in (False, True):
        buffer = logits.clone()
        actual = fused_policy_loss(buffer, targets, term, triton=True, tuning=SMALL, inplace=inplace, **options)
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(actual.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
        torch.testing.assert_close(actual[2], expected[2], **tolerance)
        assert (actual[2].data_ptr() == buffer.data_ptr()) is inplace
    assert not expected[2][1].any(), "a token of weight 0 has no gradient"


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "cispo"])
def test_the_fused_reference_is_autograd_of_the_composed_loss(loss):
    from miles.algos.config import AlgoConfig
    from miles.algos.losses import policy_loss, reduce_loss
    from miles.algos.sequences import Sequences

    logits, targets, advantages, spread = problem(torch.float32, width=50)
    targets, leaf = targets % 50, logits.clone().requires_grad_(True)
    log_probs = leaf.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old = (log_probs + 0.3 * spread).detach()
    weights = torch.tensor([0.2, 0.0, 0.1, 0.3, 0.2, 0.1])
    config = AlgoConfig(loss=loss, dual_clip_c=1.5 if loss == "dual_clip" else None)
    rows = torch.arange(6)
    composed = policy_loss(log_probs, old, advantages, weights != 0, Sequences(rows, torch.ones_like(rows)), config)
    total = reduce_loss(composed.loss, weights)
    (expected,) = torch.autograd.grad(total, leaf)
    term = PolicyTerm(advantages, weights, old, loss=loss, dual_c=1.5)
    losses, _, gradient, _ = fused_policy_loss(logits, targets, term, valid=50)
    torch.testing.assert_close(losses.sum(), total.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "targets", "valid", "message"),
    [
        (torch.zeros(4, 8).T, torch.zeros(8, dtype=torch.int64), 4, "contiguous rows"),
        (torch.zeros(4, 8), torch.zeros(3, dtype=torch.int64), 8, r"targets: expected \[4\]"),
        (torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), 9, "valid columns: 9 of 8"),
    ],
)
def test_wrong_shapes_are_named(logits, targets, valid, message):
    with pytest.raises(ValueError, match=message):
        row_stats(logits, targets, valid=valid)


@pytest.mark.parametrize("triton", [False, True])
def test_scaling_by_one_touches_nothing_and_other_factors_scale(triton):
    values = torch.randn(3, 5000)
    expected = values * 2.5
    kept = values.clone()
    assert torch.equal(scale_(kept, torch.tensor([1.0]), triton=triton), values)
    torch.testing.assert_close(scale_(values, torch.tensor([2.5]), triton=triton), expected)


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_picking_rows_inside_equals_picking_them_before(triton, dtype):
    logits, targets, g, h = problem(dtype, rows=6)
    targets = targets[:4] % 1090
    rows = torch.tensor([4, 0, 5, 2])
    options = {"valid": 1090, "temperature": 0.8}
    expected = row_stats(logits[rows], targets, with_entropy=True, **options)
    run = {**options, "rows": rows, "triton": triton, "tuning": SMALL}
    actual = row_stats(logits, targets, with_entropy=True, **run)
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual.target, expected.target, rtol=1e-6, atol=1e-6)
    lse = expected.maximum + expected.total.log()
    entropy = {"entropy": lse - expected.weighted / expected.total, "grad_entropy": h[:4]}
    picked = logits_gradient(logits[rows], targets, lse, g[:4], **entropy, **options)
    gradient = logits_gradient(logits, targets, lse, g[:4], **entropy, **run)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(gradient[rows], picked, **tolerance)
    assert not gradient[[1, 3]].any()
    term = PolicyTerm(g[:4], torch.full((4,), 0.25), (expected.target - lse) + 0.1 * h[:4])
    losses, log_probs, grad, _ = fused_policy_loss(logits[rows], targets, term, **options)
    for inplace in (False, True):
        found = fused_policy_loss(logits.clone(), targets, term, inplace=inplace, **run)
        torch.testing.assert_close(found[0], losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], log_probs, rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(found[2][rows], grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
        assert not found[2][[1, 3]].any()
