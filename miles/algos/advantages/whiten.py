"""Whitening over the active tokens of a step, across the data- and context-parallel ranks that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.distributed as dist


def whiten(values: torch.Tensor, mask: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """(x - mu)·rsqrt(var + 1e-8) over the active tokens of every rank in `group` (data x context parallel).

    mu = sum(m x)/n, var = sum(m (x-mu)^2)/max(n-1, 1), accumulated in float64 on every device. fp32 out, 0 at
    masked tokens; n <= 1 gives zeros. Every rank must call, whatever its slice holds.
    """
    import torch

    from miles.algos.collectives import all_reduce

    active = mask.to(torch.bool)
    x = torch.where(active, values.to(torch.float64), 0.0)
    totals = all_reduce(torch.stack([x.sum(), active.sum().to(torch.float64)]), group=group, name="whitening sums")
    n = totals[1]
    mean = totals[0] / n.clamp(min=1.0)
    centred = torch.where(active, x - mean, 0.0)
    squares = all_reduce(centred.square().sum().reshape(1), group=group, name="whitening squares")
    variance = squares[0] / (n - 1.0).clamp(min=1.0)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    return torch.where(n > 1, whitened, 0.0).to(torch.float32)


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`whiten` of arrays that one process holds whole: float32 [n]."""
    import torch

    return whiten(torch.tensor(values), torch.tensor(mask)).numpy()
