"""Addresses of a list of weights as one device table, so that one kernel launch covers the whole list.

A weight is cut into chunks; a program takes one chunk. Tables are cached by addresses and sizes: parameters stay
where they are, so a training step builds none. Building one copies from pageable memory and is therefore refused
inside a graph capture.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

_CACHE_SIZE = 64
_cache: OrderedDict[tuple, WeightTable] = OrderedDict()
_captured: dict[tuple, WeightTable] = {}  # a captured graph reads its table at every replay


@dataclass(frozen=True)
class WeightTable:
    """`columns` int64 [k, n] and `chunk_weight` int32 [chunks], both on the device of the weights."""

    columns: torch.Tensor
    chunk_weight: torch.Tensor

    @property
    def n(self) -> int:
        return self.columns.shape[1]

    @property
    def chunks(self) -> int:
        return self.chunk_weight.shape[0]


def weight_table(
    columns: Sequence[Sequence[int]], units: Sequence[int], units_per_chunk: int, device: torch.device
) -> WeightTable:
    """Build (or find) the table whose last column is the first chunk of each weight.

    `columns`: k lists of n integers (addresses, offsets, sizes); `units[i]`: work units of weight i.
    """
    key = (tuple(map(tuple, columns)), tuple(units), units_per_chunk, device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    found = _captured.get(key) or _cache.get(key)
    if found is not None:
        if capturing:
            _captured[key] = found
        elif key in _cache:
            _cache.move_to_end(key)
        return found
    if capturing:
        raise RuntimeError(
            "this list of weights is new inside a graph capture: call once before the capture (warm up first)"
        )
    counts = [-(-u // units_per_chunk) for u in units]
    first, total = [], 0
    for count in counts:
        first.append(total)
        total += count
    chunk_weight = torch.repeat_interleave(torch.arange(len(units), dtype=torch.int32), torch.tensor(counts))
    table = WeightTable(
        torch.tensor([*map(list, columns), first], dtype=torch.int64).to(device), chunk_weight.to(device)
    )
    _cache[key] = table
    if len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return table


def on_device(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device: make it that of the weights, and restore it afterwards."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
