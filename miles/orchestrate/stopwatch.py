"""Seconds of each part of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Runs from its making; parts are named like their metrics (`time/train`)."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the body as `name`."""
        begun = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - begun

    def finish(self) -> dict[str, float]:
        """Every part's seconds, and all of them together with what lies between as `time/step`."""
        return {**self._seconds, "time/step": time.perf_counter() - self._start}
