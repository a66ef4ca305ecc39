"""Where the documents of a packed row stand, in the form that attention and rotary embedding read.

Free of megatron-core, so that it can be imported before the CPU shim is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """Where the documents of a packed row stand. Travels through megatron-core as `packed_seq_params`.

    `positions` int64 [T]: position inside its document of each token. `rows[i]` int64 [D, L] gathers the D
    documents of bucket i, padded to L with index 0; `restore` int64 [T] picks the tokens back out of the
    concatenated buckets.
    """

    positions: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    restore: torch.Tensor
    # megatron-core treats only the value "thd" specially; any other leaves q, k, v as [T, 1, heads, d].
    qkv_format: str = "documents"
    cp_group: Any = None

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> DocumentLayout:
        """Documents in order, their lengths covering the row. Buckets are the powers of two, so at most half is padding."""
        sizes = torch.tensor(list(lengths), dtype=torch.int64)
        if sizes.numel() == 0 or int(sizes.min()) < 1:
            raise ValueError(f"every document needs at least one token, got lengths {list(lengths)[:8]}")
        starts = torch.cumsum(sizes, 0) - sizes
        total = int(sizes.sum())
        document = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        positions = torch.arange(total) - starts[document]
        bucket = torch.ceil(torch.log2(sizes.to(torch.float64))).to(torch.int64)
        restore = torch.empty(total, dtype=torch.int64)
        rows = []
        offset = 0
        for power in torch.unique(bucket).tolist():
            members = torch.nonzero(bucket == power).flatten()
            width = int(sizes[members].max())
            inside = torch.arange(width)[None, :]
            index = torch.where(inside < sizes[members, None], starts[members, None] + inside, 0)
            slot_of = torch.full((len(sizes),), -1, dtype=torch.int64)
            slot_of[members] = torch.arange(len(members)) * width + offset
            mine = torch.nonzero(slot_of[document] >= 0).flatten()
            restore[mine] = slot_of[document[mine]] + positions[mine]
            rows.append(index)
            offset += index.numel()
        return cls(
            positions=positions.to(device),
            rows=tuple(index.to(device) for index in rows),
            restore=restore.to(device),
        )
