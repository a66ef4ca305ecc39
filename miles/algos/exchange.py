"""Differentiable exchange of per-token values between two context layouts of one token plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from miles.algos.collectives import all_reduce, group_size
from miles.algos.context import ContextLayout


def exchange(
    local: torch.Tensor,
    lengths: Sequence[int],
    source: ContextLayout,
    target: ContextLayout,
    *,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """[T_local, ...] in `source` order -> the same plane in `target` order. Backward returns gradients to `source`.

    `lengths` must already divide for both layouts (`ValueError` otherwise).
    """
    if not source.size == target.size == group_size(group) or source.rank != target.rank:
        raise ValueError(
            f"exchange: layouts of {source.size} and {target.size} ranks over a group of {group_size(group)}"
        )
    held = torch.from_numpy(source.held(lengths, source.rank)).to(local.device)
    wanted = torch.from_numpy(target.held(lengths, target.rank)).to(local.device)
    if len(held) != len(local):
        raise ValueError(f"exchange: rank {source.rank} holds {len(held)} tokens, got {len(local)} values")
    return _Exchange.apply(local, held, wanted, sum(lengths), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        held: torch.Tensor,
        wanted: torch.Tensor,
        total: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(held, wanted)
        ctx.total, ctx.group = total, group
        return _route(local, held, wanted, total, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        held, wanted = ctx.saved_tensors
        return _route(grad, wanted, held, ctx.total, ctx.group), None, None, None, None


def _route(
    local: torch.Tensor, held: torch.Tensor, wanted: torch.Tensor, total: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    # Positions are disjoint over ranks, so a sum of planes is a gather; per-token scalars make the plane small.
    plane = local.new_zeros((total, *local.shape[1:]))
    plane[held] = local
    return all_reduce(plane, group=group, name="context exchange")[wanted]
