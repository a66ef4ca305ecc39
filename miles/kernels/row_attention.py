"""Attention in plain torch whose result for a query row does not depend on what is computed beside it.

The embedded engine and the trainer's CPU path share it, so that both give the same numbers bit for bit. What makes
it hold in fp32 on the CPU (measured, and probed by the engine at start): an element of a matrix product is summed in
order of the reduction, whatever the number of rows >= 4, the number of columns (a multiple of 16) and zeros in the
reduction, while that is at most 256 long; exp and max are element-wise. So queries come in blocks of at least 4
rows, keys in multiples of 16, and the sums over keys run in chunks of 256, added in order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

MIN_ROWS = 4
KEY_MULTIPLE = 16
KEY_CHUNK = 256


def attend_rows(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """softmax(query · keys) · values per row, in the query's dtype; scores and sums are at least fp32. Differentiable.

    query [h, b, t, g, d], already scaled, with t·g >= MIN_ROWS: g query heads share each of h key heads. keys, values
    [h, b, l, d] with l a multiple of KEY_MULTIPLE. masked: bool, broadcastable to [h, b, t, g, l], True where a key
    is not visible; every row sees at least one.
    """
    h, b, t, g, d = query.shape
    length = keys.shape[2]
    if t * g < MIN_ROWS or length % KEY_MULTIPLE:
        raise ValueError(
            f"{t * g} query rows and {length} keys: at least {MIN_ROWS} rows and a multiple of {KEY_MULTIPLE} keys"
        )
    flat = query.reshape(h * b, t * g, d), keys.reshape(h * b, length, d), values.reshape(h * b, length, d)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat):
        out = _Attend.apply(*flat, masked, (h, b, t, g))
    else:
        out = _forward(*flat, masked, (h, b, t, g))[0]
    return out.view(h, b, t, g, d)


def _forward(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masked: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result [n, m, d], exp(score - row maximum) [n, m, l], its sum over keys [n, m, 1])."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).view(*shape, -1)
    scores.masked_fill_(masked, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp_().view(*query.shape[:2], -1)
    mixed, mass = _weighted_sum(weights, values)
    return (mixed / mass).to(query.dtype), weights, mass


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over keys of weight · value [n, m, d], sum of weights [n, m, 1]), in ordered chunks of keys."""
    length = weights.shape[-1]
    if length <= KEY_CHUNK:
        # Eight equal columns: a product with one column takes another path, with another order of sums.
        mass = torch.matmul(weights, _ones(weights.device, weights.dtype)[:length])[..., :1]
        return torch.bmm(weights.to(values.dtype), values).to(weights.dtype), mass
    mixed: torch.Tensor | None = None
    total: torch.Tensor | None = None
    for at in range(0, length, KEY_CHUNK):
        part, part_mass = _weighted_sum(
            weights[..., at : at + KEY_CHUNK].contiguous(), values[:, at : at + KEY_CHUNK].contiguous()
        )
        mixed = part if mixed is None else mixed + part
        total = part_mass if total is None else total + part_mass
    assert mixed is not None
    assert total is not None
    return mixed, total


@cache
def _ones(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(KEY_CHUNK, 8, device=device, dtype=dtype)


class _Attend(torch.autograd.Function):
    """With p = weight / mass and s the scores: ds = p (do·v - sum(do · out)), dq = ds · k, dk = ds^T · q, dv = p^T · do."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        masked: torch.Tensor,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        out, weights, mass = _forward(query, keys, values, masked, shape)
        ctx.save_for_backward(query, keys, values, out, weights, mass)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, keys, values, out, weights, mass = ctx.saved_tensors
        wide = weights.dtype
        p = weights / mass
        outward = grad.to(wide)
        inner = (outward * out.to(wide)).sum(-1, keepdim=True)
        slope = (torch.bmm(outward, values.to(wide).transpose(1, 2)) - inner).mul_(p)
        return (
            torch.bmm(slope, keys.to(wide)).to(query.dtype),
            torch.bmm(slope.transpose(1, 2), query.to(wide)).to(keys.dtype),
            torch.bmm(p.transpose(1, 2), outward).to(values.dtype),
            None,
            None,
        )
