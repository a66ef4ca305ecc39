"""Paged key-value cache, and how the sequences of one forward pass are grouped for attention.

A row's result does not depend on the other rows (`miles.kernels.row_attention`): prefill and decode agree bit for
bit, which makes prefix reuse exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles.kernels.row_attention import MIN_ROWS, attend_rows
from miles.rollout.engines.embedded.pages import PAGE, SCRATCH

ROW_BLOCK = 16  # forward passes are padded to a multiple of this many rows
SCORE_BUDGET = 1 << 25  # elements of one group's score matrix


@dataclass(slots=True)
class _Group:
    """Sequences attended together. Shapes: b sequences, t query rows each, l = pages * PAGE keys."""

    b: int
    t: int
    pages: torch.Tensor  # int64 [b * pages]
    masked: torch.Tensor  # bool [b, t, 1, l], True where the key is not visible
    query_rows: torch.Tensor | None  # int64 [b * t]; None: the first b rows, t = 1
    picked: torch.Tensor  # int64: which of the b * t results are real
    target_rows: torch.Tensor | None  # int64: where they go; None: in order


class KVCache:
    """Storage [layers, 2, kv_heads, pages * PAGE, head_dim], zero at start: masked keys must be finite."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        heads: int,
        head_dim: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv_heads, self.group, self.head_dim = kv_heads, heads // kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.device = device
        self.data = torch.zeros(layers, 2, kv_heads, pages * PAGE, head_dim, dtype=dtype, device=device)

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        paged = self.data.view(*self.data.shape[:3], -1, PAGE * self.head_dim)
        paged[:, :, :, target] = paged[:, :, :, source]

    def wipe_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold non-finite values: 0 x NaN would spoil their next owner."""
        self.data.view(*self.data.shape[:3], -1, PAGE * self.head_dim)[:, :, :, pages] = 0

    def plan(self, start: np.ndarray, count: np.ndarray, tables: np.ndarray, rows: int) -> AttentionPlan:
        """Plan one forward pass.

        Sequence i brings tokens start[i] .. start[i]+count[i]-1, rows in order; tables int64 [n, pages] names its
        pages, SCRATCH beyond them. `rows` >= sum(count) is the padded number of rows.
        """
        total = int(count.sum())
        slots = np.full(rows, SCRATCH * PAGE, dtype=np.int64)
        owner = np.repeat(np.arange(len(count)), count)
        offsets = np.concatenate(([0], np.cumsum(count)))
        positions = np.zeros(rows, dtype=np.int64)
        positions[:total] = start[owner] + np.arange(total) - offsets[owner]
        slots[:total] = tables[owner, positions[:total] // PAGE] * PAGE + positions[:total] % PAGE
        needed = (start + count + PAGE - 1) // PAGE
        widths = 1 << np.ceil(np.log2(np.maximum(needed, 1))).astype(np.int64)
        groups = []
        for width in np.unique(widths):
            members = np.flatnonzero(widths == width)
            for part in self._within_budget(members, count, int(width)):
                groups.append(self._group(part, int(width), start, count, offsets, tables, len(count)))
        return AttentionPlan(self, self._to(positions), self._to(slots), groups, rows)

    def _within_budget(self, members: np.ndarray, count: np.ndarray, width: int) -> list[np.ndarray]:
        per_row = self.group * self.kv_heads * width * PAGE
        size = max(SCORE_BUDGET // max(per_row * int(count[members].max()), 1), 1)
        return [members[i : i + size] for i in range(0, len(members), size)]

    def _group(
        self, members: np.ndarray, width: int, start: np.ndarray, count: np.ndarray, offsets: np.ndarray,
        tables: np.ndarray, sequences: int,
    ) -> _Group:  # fmt: skip
        counts = count[members]
        b, real = len(members), int(counts.max())
        t = max(real, -(-MIN_ROWS // self.group))
        # Surplus query rows repeat the sequence's last row.
        step = np.minimum(np.arange(t)[None, :], counts[:, None] - 1)
        position = start[members][:, None] + step
        masked = np.arange(width * PAGE)[None, None, :] > position[:, :, None]
        table = np.full((b, width), SCRATCH, dtype=np.int64)
        columns = min(width, tables.shape[1])
        table[:, :columns] = tables[members, :columns]
        whole = b == sequences and real == 1
        picked = np.flatnonzero(np.arange(t)[None, :] < counts[:, None])
        query = (offsets[members][:, None] + step).reshape(-1)
        return _Group(
            b=b,
            t=t,
            pages=self._to(table.reshape(-1)),
            masked=self._to(masked[:, :, None, :]),
            query_rows=None if whole and t == 1 else self._to(query),
            picked=self._to(picked),
            target_rows=None if b == sequences else self._to(query[picked]),
        )

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


@dataclass(slots=True)
class AttentionPlan:
    """`attend` for one forward pass. positions, slots: int64 [rows]."""

    cache: KVCache
    positions: torch.Tensor
    slots: torch.Tensor
    groups: list[_Group]
    rows: int

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, dim], k and v [rows, kv_heads, dim] -> [rows, heads * dim]; stores k and v first."""
        cache = self.cache
        store = cache.data[layer]
        store[0].index_copy_(1, self.slots, k.transpose(0, 1))
        store[1].index_copy_(1, self.slots, v.transpose(0, 1))
        out = None
        for group in self.groups:
            part = _attend_group(cache, store, group, q)
            if group.target_rows is None:
                out = part if len(part) == self.rows else _padded(part, self.rows)
                continue
            if out is None:
                out = torch.zeros(self.rows, part.shape[1], dtype=part.dtype, device=part.device)
            out[group.target_rows] = part
        assert out is not None, "a pass without rows"
        return out


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)))


def _attend_group(cache: KVCache, store: torch.Tensor, group: _Group, q: torch.Tensor) -> torch.Tensor:
    h, g, d, b, t = cache.kv_heads, cache.group, cache.head_dim, group.b, group.t
    gathered = store.view(2, h, -1, PAGE * d).index_select(2, group.pages).view(2, h, b, -1, d)
    rows = q[:b] if group.query_rows is None else q[group.query_rows]
    # [b, t, h, g, d] -> [h, b, t, g, d]: one matrix of t * g rows for each (kv head, sequence).
    query = rows.view(b, t, h, g, d).permute(2, 0, 1, 3, 4) * cache.scale
    mixed = attend_rows(query, gathered[0], gathered[1], group.masked)
    mixed = mixed.permute(1, 2, 0, 3, 4).reshape(b * t, h * g * d)
    return mixed if len(group.picked) == b * t else mixed[group.picked]
