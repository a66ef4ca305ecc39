"""Seconds of a step by part."""

from __future__ import annotations

import itertools

import pytest

from miles.orchestrate import stopwatch


def test_each_part_has_its_own_seconds_and_the_step_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(start=100.0, step=1.0)
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = stopwatch.Stopwatch()  # 100
    with watch.measure("time/a"):  # 101 to 103
        next(clock)
    with watch.measure("time/b"):  # 104 to 105
        pass
    assert watch.finish() == {"time/a": 2.0, "time/b": 1.0, "time/step": 6.0}
