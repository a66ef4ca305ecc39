"""Sums and means over the tokens of a sequence, wherever its tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from miles.algos.collectives import all_reduce_sum, segment_sum

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each of the n tokens belongs to: `index` int64 [n] ascending, `lengths` int64 [S] its runs.

    With context parallelism a sequence's tokens are spread over `cp_group`; sums over a sequence are reduced there.
    """

    index: torch.Tensor
    lengths: torch.Tensor
    cp_group: dist.ProcessGroup | None = None

    def total(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Sum per sequence [S], over all context-parallel ranks; differentiable."""
        return all_reduce_sum(segment_sum(values, self.lengths), group=self.cp_group, name=name)

    def active(self, mask: torch.Tensor) -> torch.Tensor:
        """Active tokens per sequence, fp32 [S]."""
        return self.total(mask.to(torch.float32), "active token counts")

    def mean(self, values: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
        """Masked mean per sequence [S]; 0 where no token is active. `values` must be 0 at masked tokens."""
        return self.total(values, name) / self.active(mask).clamp(min=1.0)
