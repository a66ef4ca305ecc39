"""How many tokens a micro-batch occupies once it is padded for sequence and context parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Padding:
    """The steps of `build_batch` and of `miles.algos.context`, counted over all context-parallel ranks together.

    `sequence`: the packed tokens are extended to a multiple of it by one more document. `document`: each packed document
    is extended. `total`: then all of them together, or, where rows are padded (`bshd`), each row.
    """

    layout: Literal["thd", "bshd"]
    sequence: int = 1
    document: int = 1
    total: int = 1

    @classmethod
    def of(cls, layout: Literal["thd", "bshd"], *, cp: int, cp_layout: str, multiple: int) -> Padding:
        """`multiple`: what sequence parallelism cuts rows into, 1 without it."""
        document = 2 * cp if cp > 1 and cp_layout == "zigzag" else 1
        return cls(layout, multiple, document, math.lcm(document, cp * multiple))

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of a micro-batch of these sequences; they divide evenly over the context-parallel ranks."""
        if not lengths:
            return 0
        if self.layout == "bshd":
            return len(lengths) * _up(max(lengths), self.total)
        documents = [*lengths, -sum(lengths) % self.sequence]
        return _up(sum(_up(length, self.document) for length in documents), self.total)

    def for_packing(self, lengths: Sequence[int], capacity: int) -> tuple[list[int], int]:
        """Lengths and capacity such that bins of these lengths within this capacity hold at most `capacity` tokens."""
        if self.layout == "bshd":
            return [_up(length, self.total) for length in lengths], capacity
        room = capacity // self.total * self.total
        # The document that fills up for sequence parallelism is itself extended: its size depends on the bin.
        if self.document > 1:
            room -= _up(self.sequence - 1, self.document)
        return [_up(length, self.document) for length in lengths], room


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
