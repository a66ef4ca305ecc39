"""Row attention against torch's, its gradient against numbers, and its rows against what is computed beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.kernels.row_attention import KEY_CHUNK, attend_rows


def example(h=2, b=3, t=5, g=2, d=8, keys=16, seen=13, dtype=torch.float32, seed=0):
    """(query, keys, values, masked): query row i sees the first seen - t + 1 + i keys."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    masked = torch.arange(keys)[None, :] > (seen - t + torch.arange(t))[:, None]
    return random(h, b, t, g, d), random(h, b, keys, d), random(h, b, keys, d), masked[None, :, None, :]


def torchs(query, keys, values, masked):
    h, b, t, g, d = query.shape
    rows = query.permute(1, 0, 3, 2, 4).reshape(b, h * g, t, d)
    k, v = (x.transpose(0, 1).repeat_interleave(g, dim=1) for x in (keys, values))
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=~masked[:, :, 0, :][:, None], scale=1.0)
    return out.view(b, h, g, t, d).permute(1, 0, 3, 2, 4)


@pytest.mark.parametrize("keys", [16, KEY_CHUNK, KEY_CHUNK + 48])
def test_it_is_softmax_attention(keys):
    given = example(keys=keys, seen=keys - 3)
    torch.testing.assert_close(attend_rows(*given), torchs(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [16, KEY_CHUNK + 16])
def test_its_gradient_is_that_of_its_definition(keys):
    query, k, v, masked = example(h=1, b=2, t=2, g=2, d=3, keys=keys, seen=keys - 3, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (query, k, v)]
    assert torch.autograd.gradcheck(lambda *x: attend_rows(*x, masked), inputs)
    upward = torch.randn(query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(attend_rows(*inputs, masked), inputs, upward)
    theirs = torch.autograd.grad(torchs(*inputs, masked), inputs, upward)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)


def test_with_and_without_gradient_it_gives_the_same_bits():
    query, k, v, masked = example()
    plain = attend_rows(query, k, v, masked)
    assert torch.equal(attend_rows(query.requires_grad_(), k, v, masked).detach(), plain)


@settings(max_examples=60)
@given(
    st.integers(4, 40), st.integers(1, 60), st.integers(1, 60), st.integers(0, 40), st.sampled_from([8, 16, 64]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_a_row_does_not_depend_on_other_rows_nor_on_masked_keys_anywhere(t, first, last, gap, d, seed):
    """The same keys with `gap` masked ones in between, other rows beside it, other sequences beside it."""
    generator = torch.Generator().manual_seed(seed)
    narrow, wide = -(-(first + last) // 16) * 16, -(-(first + gap + last) // 16) * 16
    query = torch.randn(1, 3, t, 1, d, generator=generator)
    k, v = (torch.randn(1, 3, first + last, d, generator=generator) for _ in range(2))

    def spread(x, length, hole):
        out = torch.randn(1, 3, length, d, generator=generator)
        out[:, :, :first] = x[:, :, :first]
        out[:, :, first + hole : first + hole + last] = x[:, :, first:]
        return out

    def mask(length, hole):
        seen = torch.zeros(length, dtype=torch.bool)
        seen[:first] = True
        seen[first + hole : first + hole + last] = True
        return ~seen.view(1, 1, 1, length)

    close = attend_rows(query, spread(k, narrow, 0), spread(v, narrow, 0), mask(narrow, 0))
    apart = attend_rows(query, spread(k, wide, gap), spread(v, wide, gap), mask(wide, gap))
    assert torch.equal(close, apart)
    fewer = attend_rows(query[:, 1:2, :4], spread(k, narrow, 0)[:, 1:2], spread(v, narrow, 0)[:, 1:2], mask(narrow, 0))
    assert torch.equal(fewer, close[:, 1:2, :4])


def test_what_would_depend_on_other_rows_is_refused():
    with pytest.raises(ValueError, match="3 query rows and 16 keys"):
        attend_rows(*example(t=3, g=1, seen=9))
    with pytest.raises(ValueError, match="10 query rows and 15 keys"):
        attend_rows(*example(keys=15))
