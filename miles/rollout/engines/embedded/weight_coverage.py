"""`Coverage`: which elements of one destination have arrived, each exactly once.

A slot gives [start, stop) along the leading dimensions of the destination and covers the trailing ones whole. Two
slots that share an element are refused when the second one comes; what no slot covered is named at the end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from math import prod

from miles.weight_wire.bucket import Slot

# Far above what a plan cuts a parameter into; bounds what a sender can make the engine remember.
MAX_PIECES = 4096


class Coverage:
    """Elements of `shape` covered so far. `refusal` says why a slot cannot be added, `add` takes it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape or (1,)
        self._total = prod(self._shape)
        # Whole boxes, one [start, stop) a dimension, in order of their start along dimension 0.
        self._boxes: list[Slot] = []
        self._longest = 0
        self.covered = 0

    @property
    def complete(self) -> bool:
        return self.covered == self._total

    def refusal(self, slot: Slot | None) -> str | None:
        """Why the slot may not be added: it leaves the destination, is empty, overlaps, or is one too many."""
        slot = slot or ()
        inside = len(slot) <= len(self._shape) and all(
            0 <= a < b <= size for (a, b), size in zip(slot, self._shape, strict=False)
        )
        if not inside:
            return f"slot {slot} leaves the destination {list(self._shape)}"
        box = self._box(slot)
        if any(_meet(box, other) for other in self._near(box)):
            return f"slot {slot or 'whole'} covers elements that have arrived already"
        if len(self._boxes) >= MAX_PIECES:
            return f"more than {MAX_PIECES} pieces"
        return None

    def add(self, slot: Slot | None) -> None:
        """Count a slot that `refusal` passed."""
        box = self._box(slot or ())
        insort(self._boxes, box)
        self._longest = max(self._longest, box[0][1] - box[0][0])
        self.covered += _volume(box)

    def gaps(self, most: int = 3) -> str:
        """What is missing, as intervals along dimension 0 and a number of elements."""
        inner = prod(self._shape[1:])
        borders = sorted({0, self._shape[0], *(edge for box in self._boxes for edge in box[0])})
        missing: list[list[int]] = []
        for start, stop in pairwise(borders):
            filled = sum(_volume(box[1:]) for box in self._boxes if box[0][0] <= start and stop <= box[0][1])
            if filled == inner:
                continue
            if missing and missing[-1][1] == start:
                missing[-1][1] = stop
            else:
                missing.append([start, stop])
        shown = ", ".join(f"[{a}, {b})" for a, b in missing[:most]) + (", ..." if len(missing) > most else "")
        return f"{self._total - self.covered} of {self._total} elements, in rows {shown}"

    def _box(self, slot: Slot) -> Slot:
        return (*slot, *((0, size) for size in self._shape[len(slot) :]))

    def _near(self, box: Slot) -> list[Slot]:
        """Boxes that may meet `box` along dimension 0."""
        start, stop = box[0]
        first = bisect_left(self._boxes, ((start - self._longest, 0),))
        last = bisect_left(self._boxes, ((stop, 0),))
        return self._boxes[first:last]


def _meet(left: Slot, right: Slot) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(left, right, strict=True))


def _volume(box: Slot) -> int:
    return prod(stop - start for start, stop in box)
