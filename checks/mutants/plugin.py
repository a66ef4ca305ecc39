"""What pytest tells the runner: which item reaches which line, how long each took, and which items are to run."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import coverage
import pytest

# Processes that a test starts read it as their context, by the coverage settings that `reach` writes.
ITEM = "MUTANTS_ITEM"


class Watch:
    """Marks every line with the item that runs, here and in processes started meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        current = coverage.Coverage.current()
        os.environ[ITEM] = item.nodeid
        if current is not None:
            current.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            os.environ.pop(ITEM, None)
            if current is not None:
                current.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)


class Only:
    """Keeps the items `wanted`, and those that nobody has `known` (item -> seconds) before: a change may have renamed
    them. An item that takes `patience_s` of processor time beyond five times what is known ends the process."""

    def __init__(self, wanted: frozenset[str], known: Mapping[str, float], *, patience_s: float) -> None:
        self.wanted, self.known, self.patience_s = wanted, known, patience_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.wanted or item.nodeid not in self.known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        # Nobody catches the signal, whatever the code under test catches.
        signal.setitimer(signal.ITIMER_PROF, self.patience_s + 5 * self.known.get(item.nodeid, 0.0))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
