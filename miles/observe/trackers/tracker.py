"""What a tracker is: opened once, given rows of `metrics.jsonl` in order, closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# What `metrics.jsonl` writes for numbers that JSON lacks.
WORDS = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True)
class TrackedRun:
    """`folder`: the run folder, absolute; `settings`: leaves of the resolved recipe by dotted key."""

    name: str
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Any call may raise anything and take any time: who calls it stands that."""

    def open(self) -> int:
        """The first step whose row is wanted by `append`: what follows the last one that the tracker holds."""

    def append(self, row: dict[str, Any]) -> None:
        """One row; its `step` is above that of every row before."""

    def close(self, *, finished: bool) -> None:
        """Everything is kept. `finished`: the run came to its end; else it may be resumed."""


def numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(metric, value) of a row's numbers, except `step`."""
    for name, value in row.items():
        if name != "step" and (isinstance(value, int | float) or value in WORDS):
            yield name, float(value)
