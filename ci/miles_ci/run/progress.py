"""While a shared process runs: which of its files have reported everything, so that a killed runner leaves that behind.

Provisional: exit code, JUnit and a second turn may still change it. Judged results replace it (`ShardRun.add`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from miles_ci.plan.model import Unit
from miles_ci.run.judge.judge import complete
from miles_ci.run.judge.pytest_events import EventReader
from miles_ci.run.results import Provisional
from miles_ci.run.shard import ShardRun, failure_record

INTERVAL_S = 3.0


class Progress:
    """Call `tick` often; every few seconds it reads what is new and records the files that have become complete."""

    def __init__(self, shard: ShardRun, units: Sequence[Unit], events: Path) -> None:
        self._shard, self._reader = shard, EventReader(events)
        self._pending = list(units)
        self._next = time.monotonic() + INTERVAL_S

    def tick(self) -> None:
        if time.monotonic() < self._next:
            return
        files = self._reader.read().files
        done = [unit for unit in self._pending if unit.path in files and complete(files[unit.path])]
        if done:
            self._pending = [unit for unit in self._pending if unit not in done]
            self._shard.report([
                Provisional(
                    unit.id, unit.path, files[unit.path].counts(),
                    tuple(failure_record(failure) for failure in files[unit.path].failures()),
                )
                for unit in done
            ])  # fmt: skip
        self._next = time.monotonic() + INTERVAL_S
