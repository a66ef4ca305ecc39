"""Bounded collectives that name what they carry. A group of None or of one process is the identity."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 300.0


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def all_reduce(
    tensor: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    name: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> torch.Tensor:
    """Reduce in place and return `tensor`. No gradient. `RuntimeError` names rank and tensor after the bound."""
    if group_size(group) == 1:
        return tensor
    try:
        if tensor.is_cuda:
            # NCCL's own watchdog bounds it; a bounded wait here would stall the host until the device is done.
            dist.all_reduce(tensor, op=op, group=group)
        else:
            dist.all_reduce(tensor, op=op, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(
            f"all-reduce of {name} {list(tensor.shape)} failed on rank {dist.get_rank()} within {timeout_s:g} s: {error}"
        ) from error
    return tensor


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, name: str) -> torch.Tensor:
        ctx.group, ctx.name = group, name
        return all_reduce(tensor.clone(), group=group, name=name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_reduce(grad.contiguous().clone(), group=ctx.group, name=f"gradient of {ctx.name}"), None, None


def all_reduce_sum(tensor: torch.Tensor, *, group: dist.ProcessGroup | None, name: str) -> torch.Tensor:
    """Differentiable sum over the group. The backward sums too: every rank's loss depends on every rank's input."""
    if group_size(group) == 1:
        return tensor
    return _AllReduceSum.apply(tensor, group, name)


def segment_sum(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums of consecutive runs of `values` [n] -> [S]; `lengths` int64 [S] (sum n); an empty run gives 0.

    Differentiable, deterministic on every device (no atomics), and without a device sync.
    """
    if values.numel() == 0:
        return values.new_zeros(len(lengths)) + values.sum()
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0, unsafe=True)
