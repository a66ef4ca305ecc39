"""Sparse support log-probs on a GPU against the dense mask, in bf16, and without a dense mask's memory."""

from __future__ import annotations

import pytest
import torch

from miles.algos.sampling_mask import support_log_probs
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=25, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["kernels"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def problem(rows: int, vocab: int, width: int):
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocab, device="cuda") * 3).bfloat16().requires_grad_(True)
    counts = torch.randint(1, 2 * width, (rows,), device="cuda")
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    # Distinct ids inside a row: an arithmetic progression from a random start.
    within = torch.arange(int(offsets[-1]), device="cuda") - torch.repeat_interleave(offsets[:-1], counts)
    starts = torch.repeat_interleave(torch.randint(0, vocab, (rows,), device="cuda"), counts)
    ids = (starts + within * 37) % vocab
    picked = offsets[:-1] + (torch.rand(rows, device="cuda") * counts).long()
    return logits, ids[picked], ids, offsets, torch.randn(rows, device="cuda")


def dense_log_probs(logits, targets, ids, offsets, *, temperature: float) -> torch.Tensor:
    """The same log-probs by masking the logits to -inf outside the support."""
    inside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    inside[torch.repeat_interleave(torch.arange(len(logits), device=logits.device), offsets.diff()), ids] = True
    log_p = (logits.float() / temperature).masked_fill(~inside, -torch.inf).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize(("rows", "vocab", "width"), [(64, 1024, 8), (512, 151_936, 64)])
def test_sparse_equals_dense_values_and_gradients_in_bf16(rows, vocab, width):
    logits, targets, ids, offsets, g = problem(rows, vocab, width)
    sparse = support_log_probs(logits, targets, ids, offsets, vocab_size=vocab, temperature=0.9)
    dense = dense_log_probs(logits, targets, ids, offsets, temperature=0.9)
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad((out * g).sum(), logits)[0] for out in (sparse, dense)]
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-4)


def test_the_backward_gives_the_same_bits_every_time():
    logits, targets, ids, offsets, g = problem(512, 32_000, 64)

    def bits() -> torch.Tensor:
        out = support_log_probs(logits, targets, ids, offsets, vocab_size=32_000)
        return torch.autograd.grad((out * g).sum(), logits)[0]

    first = bits()
    assert all(torch.equal(first, bits()) for _ in range(3))


def test_no_dense_mask_is_built():
    rows, vocab = 2048, 151_936
    logits, targets, ids, offsets, _ = problem(rows, vocab, 64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        support_log_probs(logits, targets, ids, offsets, vocab_size=vocab)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < rows * vocab / 16
