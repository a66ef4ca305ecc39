"""Log-prob kernels on a GPU: values against float64, memory bound, in-place gradient, determinism."""

from __future__ import annotations

import pytest
import torch

from miles.algos.log_probs import vocab_parallel_scores
from miles.kernels.log_probs import PolicyTerm, fused_policy_loss, scale_
from miles.kernels.log_probs.reference import reference_fused_policy_loss
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=25, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["kernels"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = [(1, 33), (7, 1000), (64, 32_000), (33, 151_936), (5, 151_939)]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def problem(shape: tuple[int, int], dtype: torch.dtype):
    torch.manual_seed(0)
    logits = (torch.randn(shape, device="cuda") * 4).to(dtype).requires_grad_(True)
    vocab = max(shape[1] - 3, 1)
    targets = torch.randint(0, vocab, (shape[0],), device="cuda")
    return logits, targets, vocab, *torch.randn(2, shape[0], device="cuda")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_log_probs_entropy_and_gradient_equal_float64(shape, dtype):
    logits, targets, vocab, g, h = problem(shape, dtype)
    exact = (logits.detach()[:, :vocab].double() / 0.8).requires_grad_(True)
    log_p = exact.log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (grad,) = torch.autograd.grad((expected * g).sum() + (entropy * h).sum(), exact)
    scores = vocab_parallel_scores(logits, targets, vocab_size=vocab, temperature=0.8, entropy="gradient")
    (ours,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * h).sum(), logits)
    assert relative(scores[0], expected) < 3e-6
    # lse minus a sum of the same size: a peaked row loses digits, in absolute terms it stays at fp32's.
    torch.testing.assert_close(scores[1].double(), entropy, rtol=5e-6, atol=2e-5)
    assert relative(ours[:, :vocab], grad / 0.8) < TOLERANCE[dtype]
    assert not ours[:, vocab:].any()


@pytest.mark.parametrize("width", [1000, 151_936])
def test_rows_picked_inside_equal_rows_picked_before(width):
    logits, targets, vocab, g, h = problem((65, width), torch.bfloat16)
    rows = torch.randperm(65, device="cuda")[:40]
    targets, g, h = targets[:40], g[:40], h[:40]
    before = vocab_parallel_scores(logits[rows], targets, vocab_size=vocab, entropy="gradient")
    (expected,) = torch.autograd.grad((before[0] * g).sum() + (before[1] * h).sum(), logits)
    inside = vocab_parallel_scores(logits, targets, rows=rows, vocab_size=vocab, entropy="gradient")
    (grad,) = torch.autograd.grad((inside[0] * g).sum() + (inside[1] * h).sum(), logits)
    assert torch.equal(inside[0], before[0])
    assert torch.equal(grad, expected)
    term = PolicyTerm(g, torch.full_like(g, 0.025), before[0].detach() + 0.1 * h)
    reference = fused_policy_loss(logits.detach()[rows], targets, term, valid=vocab)
    for inplace in (False, True):
        found = fused_policy_loss(logits.detach().clone(), targets, term, rows=rows, valid=vocab, inplace=inplace)
        assert torch.equal(found[0], reference[0])
        assert torch.equal(found[2][rows], reference[2])
        rest = torch.ones(65, dtype=torch.bool, device="cuda").index_fill(0, rows, False)
        assert not found[2][rest].any()


def test_the_gradient_is_scaled_only_by_factors_other_than_one():
    values = torch.randn(1000, 1003, device="cuda").bfloat16()
    kept = values.clone()
    assert torch.equal(scale_(kept, torch.ones(1, device="cuda")), values)
    torch.testing.assert_close(scale_(kept, torch.full((1,), 2.5, device="cuda")), values * 2.5)


def test_extra_memory_is_the_gradient_plus_64_mib():
    rows, vocab = 4096, 151_936
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scores = vocab_parallel_scores(logits, targets, vocab_size=vocab, entropy="gradient")
    (grad,) = torch.autograd.grad(scores[0].sum() + scores[1].sum(), logits)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= grad.numel() * grad.element_size() + (64 << 20)


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "cispo"])
@pytest.mark.parametrize("shape", [(7, 1000), (300, 151_936)])
def test_the_fused_loss_equals_the_reference(loss, shape):
    logits, targets, vocab, advantages, spread = problem(shape, torch.bfloat16)
    logits = logits.detach()
    log_probs = vocab_parallel_scores(logits, targets, vocab_size=vocab)[0]
    weights = torch.full((shape[0],), 1.0 / shape[0], device="cuda")
    weights[3] = 0.0
    term = PolicyTerm(advantages, weights, log_probs + 0.2 * spread, loss=loss)
    expected = reference_fused_policy_loss(
        logits, targets, term, rows=None, valid=vocab, temperature=1.0, chunk_rows=64
    )
    buffer = logits.clone()
    actual = fused_policy_loss(buffer, targets, term, valid=vocab, inplace=True)
    assert actual[2].data_ptr() == buffer.data_ptr()
    assert relative(actual[0], expected[0].double()) < 1e-4
    assert relative(actual[1], expected[1].double()) < 1e-5
    # Rows at the edge of a clip may fall on either side of it.
    edge = (torch.isclose((log_probs - term.old).exp(), torch.tensor(0.8, device="cuda"), rtol=1e-4)) | (
        torch.isclose((log_probs - term.old).exp(), torch.tensor(1.2, device="cuda"), rtol=1e-4)
    )
    assert relative(actual[2][~edge], expected[2][~edge].double()) < 5e-3
    assert not actual[2][3].any()


def test_repeated_runs_give_the_same_bits():
    logits, targets, vocab, g, h = problem((256, 151_936), torch.bfloat16)

    def bits() -> tuple[torch.Tensor, ...]:
        scores = vocab_parallel_scores(logits, targets, vocab_size=vocab, entropy="gradient")
        (grad,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * h).sum(), logits)
        return scores[0].detach(), scores[1].detach(), grad

    first = bits()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True))


def test_a_target_outside_the_vocabulary_is_named():
    logits, targets, vocab, *_ = problem((64, 32_000), torch.bfloat16)
    targets[9] = vocab
    with pytest.raises(ValueError, match=f"target {vocab} at index 9"):
        vocab_parallel_scores(logits, targets, vocab_size=vocab)
