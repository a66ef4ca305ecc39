from __future__ import annotations

import math

import pytest
import torch

from miles.algos.log_probs import vocab_parallel_scores


def problem(n: int = 12, width: int = 40, *, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, width, generator=generator) * 3).to(dtype).requires_grad_(True)
    targets = torch.randint(0, width - 5, (n,), generator=generator)
    return logits, targets, torch.randn(n, generator=generator), torch.randn(n, generator=generator)


def plain(logits, targets, vocab, temperature):
    log_p = (logits[:, :vocab].double() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [40, 35])
def test_values_and_gradients_equal_float64_log_softmax(temperature, vocab):
    logits, targets, g, h = problem()
    expected, entropy = plain(logits, targets, vocab, temperature)
    (expected_grad,) = torch.autograd.grad((expected * g).sum() + (entropy * h).sum(), logits)
    scores = vocab_parallel_scores(
        logits, targets, vocab_size=vocab, temperature=temperature, entropy="gradient", chunk_rows=5
    )
    torch.testing.assert_close(scores[0], expected.float(), rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(scores[1], entropy.float(), rtol=1e-6, atol=5e-6)
    (grad,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * h).sum(), logits)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=5e-6)


def test_gradient_passes_gradcheck_through_finite_differences():
    logits, targets, g, _ = problem(3, 9)
    (grad,) = torch.autograd.grad((vocab_parallel_scores(logits, targets, vocab_size=9)[0] * g).sum(), logits)
    with torch.no_grad():
        for row, column in ((0, 0), (1, 4), (2, 8)):
            shifted = logits.detach().double()
            low, high = shifted.clone(), shifted.clone()
            low[row, column] -= 1e-4
            high[row, column] += 1e-4
            difference = (plain(high, targets, 9, 1.0)[0] - plain(low, targets, 9, 1.0)[0]) @ g.double() / 2e-4
            assert float(grad[row, column]) == pytest.approx(float(difference), rel=1e-4, abs=1e-6)


def test_log_prob_chunking_bitwise_independent_of_chunk_rows():
    logits, targets, g, h = problem(33, 700, dtype=torch.bfloat16)
    results = []
    for chunk_rows in (1, 4, 32, 1000):
        scores = vocab_parallel_scores(
            logits, targets, vocab_size=695, temperature=0.9, entropy="gradient", chunk_rows=chunk_rows
        )
        (grad,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * h).sum(), logits)
        results.append((scores[0].detach(), scores[1].detach(), grad))
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert torch.equal(left, right)


def test_padded_vocab_excluded():
    logits, targets, g, h = problem()
    with torch.no_grad():
        logits[:, 35:] = 1e4  # a padded column that was looked at would win everything
    log_probs, entropy = vocab_parallel_scores(logits, targets, vocab_size=35, entropy="gradient")
    expected, expected_entropy = plain(logits, targets, 35, 1.0)
    torch.testing.assert_close(log_probs, expected.float(), rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(entropy, expected_entropy.float(), rtol=1e-6, atol=5e-6)
    (grad,) = torch.autograd.grad((log_probs * g).sum() + (entropy * h).sum(), logits)
    assert not grad[:, 35:].any()


def test_forbidden_tokens_keep_entropy_and_gradient_finite():
    logits, targets, g, h = problem()
    with torch.no_grad():
        logits[:, 36:] = -math.inf
    log_probs, entropy = vocab_parallel_scores(logits, targets, vocab_size=40, entropy="gradient")
    (grad,) = torch.autograd.grad((log_probs * g).sum() + (entropy * h).sum(), logits)
    assert torch.isfinite(torch.cat([log_probs, entropy, grad.flatten()])).all()
    torch.testing.assert_close(entropy, plain(logits, targets, 36, 1.0)[1].float(), rtol=1e-6, atol=5e-6)


def test_entropy_without_gradient_sends_none():
    logits, targets, *_ = problem()
    _, entropy = vocab_parallel_scores(logits, targets, vocab_size=40, entropy="value")
    assert not entropy.requires_grad
    assert vocab_parallel_scores(logits, targets, vocab_size=40, entropy="gradient")[1].requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    logits, targets, *_ = problem()
    with pytest.raises(ValueError, match="sample with a temperature above 0"):
        vocab_parallel_scores(logits, targets, vocab_size=40, temperature=temperature)


@pytest.mark.parametrize("wrong", [-1, 35, 10**6])
def test_a_target_outside_the_vocabulary_is_named(wrong):
    logits, targets, *_ = problem()
    targets[7] = wrong
    with pytest.raises(ValueError, match=f"target {wrong} at index 7 is outside the vocabulary of 35 tokens"):
        vocab_parallel_scores(logits, targets, vocab_size=35)


def test_shards_too_small_for_the_vocabulary_are_refused():
    logits, targets, *_ = problem()
    with pytest.raises(ValueError, match="1 shards of 40 columns hold no vocabulary of 41"):
        vocab_parallel_scores(logits, targets, vocab_size=41)


def test_no_rows_give_an_empty_result_in_the_graph():
    logits = torch.zeros(0, 8, requires_grad=True)
    out = vocab_parallel_scores(logits, torch.zeros(0, dtype=torch.int64), vocab_size=8)[0]
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert grad.shape == (0, 8)


@pytest.mark.parametrize("vocab", [40, 27, 18])
def test_tensor_parallel_shards_equal_one_device(gloo_ranks, vocab):
    """With 18 of 40 columns the second shard holds no valid column at all."""
    logits, targets, g, h = problem()
    targets = targets % vocab
    expected = vocab_parallel_scores(logits, targets, vocab_size=vocab, temperature=0.8, entropy="gradient")
    (expected_grad,) = torch.autograd.grad((expected[0] * g).sum() + (expected[1] * h).sum(), logits)

    def work(rank: int):
        import torch.distributed as dist

        shard = logits.detach()[:, rank * 20 : rank * 20 + 20].clone().requires_grad_(True)
        scores = vocab_parallel_scores(
            shard, targets, vocab_size=vocab, group=dist.group.WORLD, temperature=0.8, entropy="gradient"
        )
        (grad,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * h).sum(), shard)
        return scores[0].detach(), scores[1].detach(), grad

    parts = gloo_ranks(2, work)
    for log_probs, entropy, _ in parts:
        torch.testing.assert_close(log_probs, expected[0].detach(), rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(entropy, expected[1].detach(), rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), expected_grad, rtol=1e-5, atol=5e-6)


def test_rows_inside_the_pass_equal_rows_picked_before():
    logits, targets, g, h = problem(12)
    rows = torch.tensor([3, 0, 11, 7])
    targets, g, h = targets[:4], g[:4], h[:4]
    picked = vocab_parallel_scores(logits[rows], targets, vocab_size=35, entropy="gradient")
    (expected,) = torch.autograd.grad((picked[0] * g).sum() + (picked[1] * h).sum(), logits)
    scores = vocab_parallel_scores(logits, targets, rows=rows, vocab_size=35, entropy="gradient", chunk_rows=3)
    (grad,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * h).sum(), logits)
    torch.testing.assert_close(scores[0], picked[0])
    torch.testing.assert_close(grad, expected)
