"""Probe: does a row of the forward pass depend on how many rows are computed with it, on this machine?

The engine's promise (same tokens and log-probs whatever else is in the batch) rests on properties of the matrix
kernels that hold for fp32 with one thread where we measured them. They are not guaranteed by torch, so the engine
checks them at start on its own weight shapes and reports the answer as `batch_invariant` in `/server_info`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from miles.kernels.row_attention import KEY_CHUNK, MIN_ROWS
from miles.rollout.engines.embedded.attention import ROW_BLOCK


def rows_are_independent(weights: Iterable[torch.Tensor]) -> bool:
    """Compare products of different row counts bit for bit, for each distinct matrix shape, and attention's sums."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()
    device, dtype = torch.device("cpu"), torch.float32
    for weight in weights:
        device, dtype = weight.device, weight.dtype
        if weight.dim() != 2 or tuple(weight.shape) in seen or weight.numel() > 1 << 24:
            continue
        seen.add(tuple(weight.shape))
        x = torch.randn(17 * ROW_BLOCK, weight.shape[1], generator=generator).to(device, dtype)
        whole = F.linear(x, weight)
        for rows, at in ((1, 0), (1, 5), (3, 2), (8, 9)):
            part = F.linear(x[at * ROW_BLOCK : (at + rows) * ROW_BLOCK], weight)
            if not torch.equal(part, whole[at * ROW_BLOCK : (at + rows) * ROW_BLOCK]):
                return False
    return _trailing_zeros_do_not_count(generator, device)


def _trailing_zeros_do_not_count(generator: torch.Generator, device: torch.device) -> bool:
    values = torch.randn(1, KEY_CHUNK, 16, generator=generator).to(device)
    weights = torch.rand(1, 32, KEY_CHUNK, generator=generator).to(device)
    for used in (16, 32, 64, 128):
        padded = weights.clone()
        padded[..., used:] = 0
        whole = torch.bmm(padded, values)
        part = torch.bmm(padded[:, :MIN_ROWS, :used].contiguous(), values[:, :used].contiguous())
        if not torch.equal(part, whole[:, :MIN_ROWS]):
            return False
    return True
