"""The own attention core against a plain masked softmax, and packed documents against documents alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module", autouse=True)
def _warm(ranks):
    """megatron-core is imported the quick way."""


def core(heads=4, groups=2, head_dim=8):
    from types import SimpleNamespace

    from miles.train.megatron.attention import OwnAttention

    attention = OwnAttention.__new__(OwnAttention)
    torch.nn.Module.__init__(attention)
    attention.config = SimpleNamespace()
    attention.scale = head_dim**-0.5
    return attention


def plain(query, key, value, document):
    """Reference: [T, 1, heads, d] with an explicit document-and-causal mask."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * query.shape[-1] ** -0.5
    index = torch.arange(len(document))
    allowed = (document[:, None] == document[None, :]) & (index[None, :] <= index[:, None])
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    return out.permute(2, 0, 1, 3).flatten(2)


def random_qkv(length, batch=1, heads=4, groups=2, head_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, batch, count, head_dim) for count in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_causal_rows_equal_plain_attention(groups):
    tensors = random_qkv(9, batch=3, groups=groups)
    out = core(groups=groups)(*tensors, None)
    for row in range(3):
        expected = plain(*[t[:, row : row + 1] for t in tensors], torch.zeros(9))
        torch.testing.assert_close(out[:, row : row + 1], expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 17), min_size=1, max_size=12))
def test_packed_documents_equal_plain_masked_attention(lengths):
    from miles.train.megatron.documents import DocumentLayout

    layout = DocumentLayout.from_lengths(lengths, torch.device("cpu"))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert layout.positions.tolist() == [i for n in lengths for i in range(n)]
    tensors = random_qkv(sum(lengths))
    out = core()(*tensors, None, packed_seq_params=layout)
    out.square().sum().backward()
    gradients = [t.grad.clone() for t in tensors]
    for t in tensors:
        t.grad = None
    expected = plain(*tensors, document)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for got, t in zip(gradients, tensors, strict=True):
        torch.testing.assert_close(got, t.grad, rtol=1e-4, atol=1e-5)


def test_bucket_padding_is_at_most_half():
    from miles.train.megatron.documents import DocumentLayout

    lengths = [1, 2, 3, 5, 9, 17, 33, 64, 65]
    layout = DocumentLayout.from_lengths(lengths, torch.device("cpu"))
    assert sum(bucket.queries.numel() for bucket in layout.buckets) <= 2 * sum(lengths)


def test_leak_is_detected_when_bounds_are_dropped():
    """The comparison above would fail if documents saw each other: one long document differs by far more."""
    from miles.train.megatron.documents import DocumentLayout

    tensors = random_qkv(16)
    split = core()(*tensors, None, packed_seq_params=DocumentLayout.from_lengths([8, 8], torch.device("cpu")))
    whole = core()(*tensors, None, packed_seq_params=DocumentLayout.from_lengths([16], torch.device("cpu")))
    assert (split - whole).abs().max() > 1e-4


def test_empty_document_is_refused():
    from miles.train.megatron.documents import DocumentLayout

    with pytest.raises(ValueError, match="at least one token"):
        DocumentLayout.from_lengths([3, 0], torch.device("cpu"))
