"""Packing sequences into bins and bins onto ranks, and the document bounds of a packed row.

Pure functions of lengths; results depend on nothing but the arguments (ties by index). `torch` is imported
only when `PackedBounds` is built.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`; an item longer than that sits alone.

    Items are taken by (-length, index), each into the first bin with room. O(n log n): a tournament tree over
    the bins' free room finds that bin.
    """
    n = len(lengths)
    order = sorted(range(n), key=lambda i: (-lengths[i], i))
    size = 1 << max(n - 1, 0).bit_length()
    free = [capacity] * (2 * size)  # leaf b is bin b; an inner node holds the larger child
    bins: list[list[int]] = []
    for index in order:
        length = lengths[index]
        if length > capacity:
            node = size + len(bins)  # the next unopened bin, closed at once
            free[node] = -1
            bins.append([index])
        else:
            node = 1
            while node < size:
                node = 2 * node if free[2 * node] >= length else 2 * node + 1
            if node - size == len(bins):
                bins.append([])
            bins[node - size].append(index)
            free[node] -= length
        node >>= 1
        while node:
            left, right = free[2 * node], free[2 * node + 1]
            free[node] = left if left >= right else right
            node >>= 1
    return bins


def padded_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Like `first_fit_decreasing` for rows padded to the longest of a bin: count x longest <= `capacity`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins, at = [], 0
    while at < len(order):
        rows = max(1, capacity // max(lengths[order[at]], 1))
        bins.append(order[at : at + rows])
        at += rows
    return bins


def karmarkar_karp(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Split n items (n a multiple of `parts`) into `parts` lists of equal count with nearly equal weight.

    Balanced largest differencing (Karmarkar and Karp 1982; Michiels et al. 2003 for equal counts): start from
    runs of `parts` neighbours in descending order, then repeatedly join the two partial solutions with the
    widest spread, heaviest part onto lightest. Ties by index.
    """
    n = len(weights)
    if n % parts:
        raise ValueError(f"karmarkar_karp: {n} items do not divide into {parts} parts; pad to a multiple first")
    order = sorted(range(n), key=lambda i: (-weights[i], i))
    heap = []
    for serial, at in enumerate(range(0, n, parts)):
        members = [(weights[i], [i]) for i in order[at : at + parts]]
        heap.append((members[-1][0] - members[0][0], serial, members))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, serial, first = heapq.heappop(heap)
        _, other, second = heapq.heappop(heap)
        # `first` descending, `second` reversed: heavy meets light.
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1][0]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(serial, other), joined))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One softmax-attention layer's cost terms; a linear-attention layer is left out (it adds 0)."""

    heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None  # sliding window or sparse top-k; None attends to all


@dataclass(frozen=True, slots=True)
class FlopsShape:
    active_params: int
    attention: tuple[AttentionLayer, ...] = ()


def sequence_flops(lengths: np.ndarray | Sequence[int], shape: FlopsShape) -> np.ndarray:
    """Forward FLOPs of each sequence, float64 [n]:
    2·L·N_active + sum over attention layers of 2H(d_qk + d_v)·(w·L - w(w-1)/2), w = min(L, window or L).
    """
    length = np.asarray(lengths, dtype=np.float64)
    total = 2.0 * length * shape.active_params
    for layer in shape.attention:
        window = length if layer.window is None else np.minimum(length, layer.window)
        pairs = window * length - window * (window - 1.0) / 2.0
        total = total + 2.0 * layer.heads * (layer.qk_dim + layer.v_dim) * pairs
    return total


@dataclass(frozen=True, slots=True)
class PackedBounds:
    """Where documents begin and end in a packed row of T tokens.

    `cu_seqlens` int32 [D+1], 0 ... T, strictly increasing; `seq_idx` int32 [1, T]; `lengths` and `max_seqlen`
    are host values (no device sync). The tail [pad_from, T), if any, is one trailing document.
    """

    cu_seqlens: torch.Tensor
    seq_idx: torch.Tensor
    lengths: tuple[int, ...]
    max_seqlen: int
    pad_from: int | None

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], *, pad_from: int | None = None, device: torch.device | str = "cpu"
    ) -> PackedBounds:
        """Bounds of documents with these lengths; with `pad_from`, the last one is padding and starts there."""
        import torch

        sizes = tuple(int(x) for x in lengths)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"packed bounds: every document needs at least one token, got lengths {list(sizes)}")
        if pad_from is not None and pad_from != sum(sizes[:-1]):
            raise ValueError(f"packed bounds: padding starts at {sum(sizes[:-1])}, not at pad_from={pad_from}")
        ends = np.cumsum([0, *sizes], dtype=np.int32)
        document = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[None]
        return cls(
            torch.from_numpy(ends).to(device), torch.from_numpy(document).to(device), sizes, max(sizes), pad_from
        )
