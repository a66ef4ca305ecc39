"""Context parallelism: which rank holds which token, and where a response's logits are.

The logit at document position p predicts token p+1; response index j = p+1-P, used iff 0 <= j < R. A layout is a
partition of the padded token plane (documents end to end when packed, rows end to end when padded), so each
response token is owned by exactly one rank. Index arithmetic is numpy, shared by both batch layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from miles.data.batch import OPTIONAL_FIELDS, MicroBatch


class ContextLayout(Protocol):
    """`size` ranks; `rank` is this one. `padded` extends lengths until they divide; `held` lists plane positions."""

    size: int
    rank: int

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Lengths of the units after padding; one more, trailing unit if the total needs it."""
        ...

    def held(self, lengths: Sequence[int], rank: int) -> np.ndarray:
        """int64 [total / size]: positions in the plane that `rank` holds, in its local order.

        `ValueError` when the (padded) lengths do not divide.
        """
        ...


def _check_rank(rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"context parallel rank {rank} of {size}")


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Each unit is cut into 2·size chunks; rank r holds chunks r and 2·size-1-r: equal work under a causal mask."""

    size: int
    rank: int
    multiple: int = 1

    def padded(self, lengths: Sequence[int]) -> list[int]:
        unit = 2 * self.size
        out = [-(-length // unit) * unit for length in lengths]
        trailing = 0
        while (sum(out) + trailing) % (self.size * self.multiple):
            trailing += unit
        return [*out, trailing] if trailing else out

    def held(self, lengths: Sequence[int], rank: int) -> np.ndarray:
        _check_rank(rank, self.size)
        unit = 2 * self.size
        for number, length in enumerate(lengths):
            if length % unit:
                raise ValueError(
                    f"zigzag: unit {number} has {length} tokens, not a multiple of 2·cp = {unit}; pad it first"
                )
        sizes = np.asarray(lengths, dtype=np.int64)
        chunk = sizes // unit
        starts = np.cumsum(sizes) - sizes
        # Two runs a unit: [start + r·c, +c) and [start + (2cp-1-r)·c, +c).
        begins = np.stack([starts + rank * chunk, starts + (unit - 1 - rank) * chunk], axis=1).ravel()
        return _runs(begins, np.repeat(chunk, 2))


@dataclass(frozen=True, slots=True)
class ContiguousAllGather:
    """The concatenated units are cut into `size` equal slices; the total is padded to a multiple of size·multiple."""

    size: int
    rank: int
    multiple: int = 1

    def padded(self, lengths: Sequence[int]) -> list[int]:
        rest = -sum(lengths) % (self.size * self.multiple)
        return [*lengths, rest] if rest else list(lengths)

    def held(self, lengths: Sequence[int], rank: int) -> np.ndarray:
        _check_rank(rank, self.size)
        total = sum(lengths)
        if total % (self.size * self.multiple):
            raise ValueError(
                f"contiguous: {total} tokens do not divide into {self.size} slices of a multiple of {self.multiple}; "
                "pad the total first"
            )
        width = total // self.size
        return np.arange(rank * width, (rank + 1) * width)


def _runs(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenated ranges [begin, begin + count)."""
    ends = np.cumsum(counts)
    return np.repeat(begins - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)


@dataclass(frozen=True, slots=True)
class ContextSlice:
    """What one context-parallel rank holds of a micro-batch.

    `micro_batch`: local tokens and the response tokens whose logits are here (`logit_index` is local).
    `query_positions` int64 [T_local]: plane positions held here; `key_positions` int64 [T_pad]: those of an
    all-gather in rank order; `unit_lengths`: padded documents or rows of the plane (documents never see each other).
    """

    micro_batch: MicroBatch
    query_positions: np.ndarray
    key_positions: np.ndarray
    unit_lengths: tuple[int, ...]

    @property
    def unit_of_position(self) -> np.ndarray:
        """int64 [T_pad]: the document (or row) of each plane position."""
        return np.repeat(np.arange(len(self.unit_lengths)), self.unit_lengths)


def localize(micro_batch: MicroBatch, layout: ContextLayout) -> ContextSlice:
    """Pad and cut a micro-batch for `layout.rank`. Token order inside `micro_batch` fields stays by sequence."""
    rows, width = micro_batch.input_ids.shape
    if micro_batch.layout.kind == "bshd":
        # A row is padded on its own and every rank keeps as many rows: no trailing unit.
        unit = layout.padded([width])
        lengths, padded = [width] * rows, [sum(unit)] * rows
    else:
        lengths = list(micro_batch.document_lengths)
        padded = layout.padded(lengths)
    sizes, padded_sizes = np.asarray(lengths, dtype=np.int64), np.asarray(padded, dtype=np.int64)
    padded_starts = np.cumsum(padded_sizes) - padded_sizes
    to_plane = _runs(padded_starts[: len(sizes)], sizes)
    total = int(padded_sizes.sum())
    plane_ids = np.zeros(total, dtype=np.int64)
    plane_ids[to_plane] = micro_batch.input_ids.ravel()
    plane_positions = np.arange(total) - np.repeat(padded_starts, padded_sizes)
    held = [_held(layout, padded, rank, micro_batch.layout.kind) for rank in range(layout.size)]
    mine = held[layout.rank]
    local_of_plane = np.full(total, -1, dtype=np.int64)
    local_of_plane[mine] = np.arange(len(mine))
    local = local_of_plane[to_plane[micro_batch.logit_index]]
    shape = (rows, -1) if micro_batch.layout.kind == "bshd" else (1, -1)
    cut = replace(
        _select(micro_batch, np.flatnonzero(local >= 0)),
        input_ids=plane_ids[mine].reshape(shape),
        position_ids=plane_positions[mine].reshape(shape),
        document_lengths=tuple(
            np.unique(np.repeat(np.arange(len(padded)), padded_sizes)[mine], return_counts=True)[1].tolist()
        ),
        pad_from=None,
        logit_index=local[local >= 0],
    )
    return ContextSlice(cut, mine, np.concatenate(held), tuple(int(x) for x in padded))


def _held(layout: ContextLayout, padded: Sequence[int], rank: int, kind: str) -> np.ndarray:
    if kind == "thd":
        return layout.held(padded, rank)
    # bshd: each row is cut alike, so that the local batch stays rectangular.
    one = layout.held(padded[:1], rank)
    return (np.arange(len(padded))[:, None] * padded[0] + one).ravel()


def _select(micro_batch: MicroBatch, keep: np.ndarray) -> MicroBatch:
    names = ("sequence", "response_index", "target_ids", "mask", "weights", "advantages", "returns", *OPTIONAL_FIELDS)
    chosen: dict[str, Any] = {}
    for name in names:
        value = getattr(micro_batch, name)
        chosen[name] = None if value is None else value[keep]
    support = micro_batch.support
    return replace(
        micro_batch,
        **chosen,
        support=None if support is None else support.select(keep),
    )
