"""How the sequences of a micro-batch lie in its rows: given once, where a batch is scheduled, and kept on the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.data.padding import Padding


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """`kind` thd: sequences end to end in one row; bshd: a row each, padded to the longest.

    `pad_multiple`: rows are padded to a multiple of it (what sequence parallelism cuts them into), with `pad_id`.
    `context_parallel`, `context_layout`: how many ranks share a row, and how it is cut. `use_support`: the samples'
    sampling masks are taken along.
    """

    kind: Literal["thd", "bshd"] = "thd"
    pad_id: int = 0
    pad_multiple: int = 1
    context_parallel: int = 1
    context_layout: Literal["zigzag", "contiguous"] = "zigzag"
    use_support: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("thd", "bshd"):
            raise ValueError(f"batch layout: kind is {self.kind!r}, expected thd or bshd")
        for name in ("pad_multiple", "context_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch layout: {name} is {getattr(self, name)}, expected at least 1")

    @property
    def padding(self) -> Padding:
        """How many tokens this layout adds."""
        return Padding.of(
            self.kind, cp=self.context_parallel, cp_layout=self.context_layout, multiple=self.pad_multiple
        )
