"""Where the documents of a packed row stand, in the form that attention and rotary embedding read.

Free of megatron-core, so that it can be imported before the CPU shim is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miles.algos.context import ContextSlice


@dataclass(frozen=True, eq=False)
class Bucket:
    """D documents of similar length. `queries` int64 [D, Lq] gathers their local tokens, padded with index 0.

    `keys` int64 [D, Lk] and `allowed` bool [D, 1, Lq, Lk] are set when this rank holds only a part of the queries;
    else queries and keys are the same tokens and the mask is causal.
    """

    queries: torch.Tensor
    keys: torch.Tensor | None = None
    allowed: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """Travels through megatron-core as `packed_seq_params`.

    `positions` int64 [T]: position inside its document of each local token. `restore` int64 [T] picks the local
    tokens out of the concatenated bucket outputs. With `context_group`, keys index the all-gathered tokens.
    """

    positions: torch.Tensor
    buckets: tuple[Bucket, ...]
    restore: torch.Tensor
    context_group: Any = None
    # megatron-core treats only the value "thd" specially; any other leaves q, k, v as [T, 1, heads, d].
    qkv_format: str = "documents"
    cp_group: Any = None

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> DocumentLayout:
        """Whole documents in order, their lengths covering the row."""
        sizes = np.asarray(lengths, dtype=np.int64)
        if len(sizes) == 0 or sizes.min() < 1:
            raise ValueError(f"every document needs at least one token, got lengths {list(lengths)[:8]}")
        starts = np.cumsum(sizes) - sizes
        positions = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
        buckets = [Bucket(move_rows(rows, device)) for rows, _ in rows_by_length(starts, sizes)]
        return cls(move_rows(positions, device), tuple(buckets), restore_rows(buckets, len(positions), starts, sizes))

    @classmethod
    def from_slice(cls, part: ContextSlice, device: torch.device, group: Any) -> DocumentLayout:
        """The local part of documents that are spread over the context-parallel `group`."""
        unit = part.unit_of_position
        mine = unit[part.query_positions]
        # Local tokens of a document need not be adjacent: sort them by document, keeping their order.
        order = np.argsort(mine, kind="stable")
        documents, first, counts = np.unique(mine[order], return_index=True, return_counts=True)
        whole_starts = np.cumsum(part.unit_lengths) - np.asarray(part.unit_lengths)
        gathered = np.empty(len(part.key_positions), dtype=np.int64)
        gathered[part.key_positions] = np.arange(len(part.key_positions))
        buckets = []
        for rows, members in rows_by_length(first, counts):
            queries = order[rows]
            names = documents[members]
            lengths = np.asarray(part.unit_lengths)[names]
            inside = np.arange(int(lengths.max()))[None, :]
            real = inside < lengths[:, None]
            plane = np.where(real, whole_starts[names][:, None] + inside, 0)
            seen = part.query_positions[queries][:, :, None] >= plane[:, None, :]
            # A padding slot must see something: an empty softmax is NaN, and so is its gradient.
            seen |= (np.arange(rows.shape[1])[None, :] >= counts[members][:, None])[:, :, None]
            buckets.append(
                Bucket(
                    move_rows(queries, device),
                    move_rows(gathered[plane], device),
                    move_rows((seen & real[:, None, :])[:, None], device),
                )
            )
        # Bucket outputs follow the sorted order; undo it.
        sorted_restore = restore_rows(buckets, len(order), first, counts)
        restore = torch.empty_like(sorted_restore)
        restore[move_rows(order, sorted_restore.device)] = sorted_restore
        positions = part.query_positions - whole_starts[mine]
        return cls(move_rows(positions, device), tuple(buckets), restore, context_group=group)


def rows_by_length(starts: np.ndarray, sizes: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(index rows [D, L] padded with 0, member documents [D]) for each power of two, so at most half is padding."""
    power = np.ceil(np.log2(sizes)).astype(np.int64)
    result = []
    for value in np.unique(power):
        members = np.flatnonzero(power == value)
        inside = np.arange(int(sizes[members].max()))[None, :]
        rows = np.where(inside < sizes[members][:, None], starts[members][:, None] + inside, 0)
        result.append((rows, members))
    return result


def restore_rows(buckets: Sequence[Bucket], total: int, starts: np.ndarray, sizes: np.ndarray) -> torch.Tensor:
    """int64 [T]: where each token stands in the concatenated, padded bucket outputs."""
    device = buckets[0].queries.device
    restore = np.empty(total, dtype=np.int64)
    offset = 0
    for rows, members in rows_by_length(starts, sizes):
        slots = offset + np.arange(rows.size).reshape(rows.shape)
        real = np.arange(rows.shape[1])[None, :] < sizes[members][:, None]
        restore[rows[real]] = slots[real]
        offset += rows.size
    return move_rows(restore, device)


def move_rows(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
