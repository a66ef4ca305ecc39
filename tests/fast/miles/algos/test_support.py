from __future__ import annotations

import numpy as np
import pytest
import torch

from miles.algos.kl import support_exact
from miles.algos.log_probs import vocab_parallel_scores
from miles.algos.sampling_mask import support_log_probs, support_log_softmax
from miles.data.sampling_mask import RolloutSamplingMask

VOCAB = 24


def dense_mask(ids: torch.Tensor, offsets: torch.Tensor, *, width: int, start: int = 0) -> torch.Tensor:
    """bool [n, width]: which columns from `start` on belong to each row's support."""
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    local = (ids >= start) & (ids < start + width)
    mask = torch.zeros((len(offsets) - 1, width), dtype=torch.bool)
    mask[rows[local], ids[local] - start] = True
    return mask


def dense_log_probs(logits, targets, ids, offsets, *, vocab_size: int, temperature: float = 1.0) -> torch.Tensor:
    """The same log-probs by masking the logits to -inf outside the support."""
    masked = logits.masked_fill(~dense_mask(ids, offsets, width=logits.shape[1]), -torch.inf)
    return vocab_parallel_scores(masked, targets, vocab_size=vocab_size, temperature=temperature)[0]


def problem(n: int = 10, seed: int = 0):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, VOCAB, n)
    # Row 0 lives in the upper half only, so that the lower half's shard has none of its ids; row 1 is a singleton.
    rows = [sorted({int(t), *rng.choice(VOCAB, 5).tolist()}) for t in targets]
    targets[0], rows[0] = 20, [13, 17, 20]
    targets[1], rows[1] = 4, [4]
    mask = RolloutSamplingMask.from_rows(rows, vocab_size=VOCAB)
    mask.require_tokens(targets)
    logits = torch.from_numpy(rng.standard_normal((n, VOCAB)) * 2).float().requires_grad_(True)
    ids, offsets = torch.from_numpy(mask.ids.astype(np.int64)), torch.from_numpy(mask.offsets.copy())
    return logits, torch.from_numpy(targets), ids, offsets, torch.from_numpy(rng.standard_normal(n)).float()


def test_support_sparse_equals_dense_values_and_grads():
    logits, targets, ids, offsets, g = problem()
    options = {"vocab_size": VOCAB, "temperature": 0.6}
    sparse = support_log_probs(logits, targets, ids, offsets, **options)
    dense = dense_log_probs(logits, targets, ids, offsets, **options)
    torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad((out * g).sum(), logits)[0] for out in (sparse, dense)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    assert sparse[1] == 0.0, "a forced token has probability 1"
    outside = ~dense_mask(ids, offsets, width=VOCAB)
    assert not grads[0][outside].any()


def test_two_shards_give_the_values_and_gradients_of_one(gloo_ranks):
    logits, targets, ids, offsets, g = problem()
    expected = support_log_probs(logits, targets, ids, offsets, vocab_size=VOCAB)
    (expected_grad,) = torch.autograd.grad((expected * g).sum(), logits)
    softmax = support_log_softmax(logits, ids, offsets)
    (softmax_grad,) = torch.autograd.grad(softmax.square().sum(), logits)

    def work(rank: int):
        import torch.distributed as dist

        shard = logits.detach()[:, rank * 12 : rank * 12 + 12].clone().requires_grad_(True)
        options = {"vocab_size": VOCAB, "group": dist.group.WORLD}
        sparse = support_log_probs(shard, targets, ids, offsets, **options)
        every = support_log_softmax(shard, ids, offsets, group=dist.group.WORLD)
        grads = [torch.autograd.grad((out * g).sum(), shard)[0] for out in (sparse,)]
        grads.append(torch.autograd.grad(every.square().sum(), shard)[0])
        return sparse.detach(), every.detach(), grads

    parts = gloo_ranks(2, work)
    for sparse, every, _ in parts:
        torch.testing.assert_close(sparse, expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(every, softmax.detach(), rtol=1e-6, atol=1e-6)
    for number, reference in enumerate((expected_grad, softmax_grad)):
        joined = torch.cat([p[2][number] for p in parts], dim=1)
        torch.testing.assert_close(joined, reference, rtol=1e-5, atol=1e-6)
        assert torch.isfinite(joined).all()


def top_p_support(logits: torch.Tensor, top_p: float) -> list[list[int]]:
    probabilities, order = logits.softmax(-1).sort(descending=True)
    keep = probabilities.cumsum(-1) - probabilities < top_p
    return [sorted(row[kept].tolist()) for row, kept in zip(order, keep, strict=True)]


def test_ratio_has_no_log_mass_term():
    """Sampler and scorer agree to 1e-6 on top-p; the full softmax is off by the log of the support's mass."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, VOCAB, generator=generator) * 2
    rows = top_p_support(logits, 0.8)
    mask = RolloutSamplingMask.from_rows(rows, vocab_size=VOCAB)
    ids, offsets = torch.from_numpy(mask.ids.astype(np.int64)), torch.from_numpy(mask.offsets.copy())
    sampler = logits.double().masked_fill(~dense_mask(ids, offsets, width=VOCAB), -torch.inf).log_softmax(-1)
    targets = torch.multinomial(sampler.exp(), 1, generator=generator)[:, 0]
    sampled = sampler.gather(1, targets[:, None])[:, 0].float()
    scores = support_log_probs(logits, targets, ids, offsets, vocab_size=VOCAB)
    ratio = (scores - sampled).exp()
    assert float((ratio - 1).abs().max()) <= 1e-6
    full = vocab_parallel_scores(logits, targets, vocab_size=VOCAB)[0]
    mass = logits.softmax(-1).masked_fill(~dense_mask(ids, offsets, width=VOCAB), 0.0).sum(-1)
    assert float(((full - sampled).exp() - 1).abs().max()) > 0.1
    torch.testing.assert_close((full - scores).exp(), mass, rtol=1e-5, atol=1e-6)
    assert float(mass.min()) >= 0.8 - 1e-5


def test_exact_kl_on_the_support_equals_enumeration():
    logits, _, ids, offsets, _ = problem()
    reference = torch.randn_like(logits)
    inside = dense_mask(ids, offsets, width=VOCAB)
    p = logits.masked_fill(~inside, -torch.inf).log_softmax(-1)
    q = reference.masked_fill(~inside, -torch.inf).log_softmax(-1)
    expected = torch.where(inside, p.exp() * (p - q), 0.0).nan_to_num(0.0).sum(-1)
    out = support_exact(
        support_log_softmax(logits, ids, offsets), support_log_softmax(reference, ids, offsets), offsets
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_exact_kl_and_its_gradient_are_of_the_distribution_at_the_sampler_s_temperature(temperature):
    logits, _, ids, offsets, g = problem()
    reference = torch.randn_like(logits)
    inside = dense_mask(ids, offsets, width=VOCAB)
    exact = logits.detach().double().requires_grad_(True)
    p = (exact / temperature).masked_fill(~inside, -1e9).log_softmax(-1)
    q = (reference.double() / temperature).masked_fill(~inside, -1e9).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    (expected_grad,) = torch.autograd.grad((expected * g.double()).sum(), exact)
    scores = [support_log_softmax(x, ids, offsets, temperature=temperature) for x in (logits, reference)]
    out = support_exact(*scores, offsets)
    (grad,) = torch.autograd.grad((out * g).sum(), logits)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="temperature is 0"):
        support_log_softmax(logits, ids, offsets, temperature=0.0)
    with pytest.raises(ValueError, match="support: 9 rows for 10 logit rows"):
        support_log_softmax(logits, ids[: offsets[9]], offsets[:10])


def test_masks_of_other_tokens_are_refused():
    logits, targets, ids, offsets, _ = problem()
    with pytest.raises(ValueError, match="support: 9 rows for 10 logit rows"):
        support_log_probs(logits, targets, ids[: offsets[9]], offsets[:10], vocab_size=VOCAB)


def outsiders():
    """Row 0 draws what its support lacks; row 1 holds an id of a padding column, which would be the likeliest."""
    logits = torch.randn(3, VOCAB + 4, generator=torch.Generator().manual_seed(2))
    logits[1, VOCAB + 1] = 9.0
    ids, offsets = torch.tensor([3, 7, 5, 6, VOCAB + 1, 2, 9]), torch.tensor([0, 2, 5, 7])
    return logits, torch.tensor([8, 6, 9]), ids, offsets


def test_a_target_outside_its_support_and_a_padding_id_score_as_in_the_dense_form():
    logits, targets, ids, offsets = outsiders()
    logits.requires_grad_(True)
    sparse = support_log_probs(logits, targets, ids, offsets, vocab_size=VOCAB)
    dense = dense_log_probs(logits, targets, ids, offsets, vocab_size=VOCAB)
    assert sparse[0] == dense[0] == -torch.inf
    torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(out[1:].sum(), logits)[0] for out in (sparse, dense)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_a_target_outside_its_support_has_no_shard(gloo_ranks):
    logits, targets, ids, offsets = outsiders()
    expected = support_log_probs(logits, targets, ids, offsets, vocab_size=VOCAB)
    width = logits.shape[1] // 2

    def work(rank: int):
        import torch.distributed as dist

        shard = logits[:, rank * width : (rank + 1) * width].contiguous()
        return support_log_probs(shard, targets, ids, offsets, vocab_size=VOCAB, group=dist.group.WORLD)

    for found in gloo_ranks(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_no_rows_are_fine():
    logits = torch.zeros(0, VOCAB, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    out = support_log_probs(logits, empty, empty, torch.zeros(1, dtype=torch.int64), vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert grad.shape == (0, VOCAB)


def test_the_backward_is_deterministic():
    logits, targets, ids, offsets, g = problem(64)
    grads = {
        torch.autograd.grad((support_log_probs(logits, targets, ids, offsets, vocab_size=VOCAB) * g).sum(), logits)[0]
        .numpy()
        .tobytes()
        for _ in range(5)
    }
    assert len(grads) == 1
