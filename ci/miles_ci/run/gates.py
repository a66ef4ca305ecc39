"""The metric gates of one unit after it has passed: read what it recorded, judge, and remember where allowed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from miles_ci.history import gate
from miles_ci.history.errors import GateError, StoreError
from miles_ci.history.gate import GateSpec, Verdict, Writer
from miles_ci.history.records import DurationRow, MetricIdentity
from miles_ci.history.store import HistoryStore
from miles_ci.run import results
from miles_ci.run.results import GateRecord, RunInfo, TestResult
from miles_ci.run.unit import RunUnit, slug

SPLIT_WORTH_S = 30.0


class GateKeeper:
    """Judges metrics for one shard. Opens the store at the first gated unit; without a store such a unit is an
    error, never a silent pass."""

    def __init__(self, info: RunInfo, open_store: Callable[[], HistoryStore] | None, default_branch: str) -> None:
        self._info = info
        self._open = open_store
        self._store: HistoryStore | None = None
        self._lock = threading.Lock()
        self._writer = Writer(info.event, info.ref, default_branch, info.cadence, info.run_attempt)

    def judge(self, unit: RunUnit, metrics: Path, *, outcome: str, attempts: int) -> list[GateRecord]:
        """Verdicts of all gates of a unit that passed; `metrics` is the folder of its process."""
        if not unit.gates or outcome not in (results.PASSED, results.FLAKY):
            return []
        try:
            records = gate.read_records(metrics / slug(unit.path))
        except GateError as error:
            return [GateRecord(spec.metric, gate.ERROR, str(error)) for spec in unit.gates]
        writes = self._writer.may_write(outcome=outcome, attempts=attempts)
        return [self._one(unit, spec, records.get(spec.metric), writes) for spec in unit.gates]

    def _one(
        self, unit: RunUnit, spec: GateSpec, series: Sequence[tuple[int, float]] | None, writes: bool
    ) -> GateRecord:
        try:
            points = gate.select_points(spec, series)
        except GateError as error:
            return GateRecord(spec.metric, gate.ERROR, str(error))
        try:
            store = self._opened()
            identity = self._identity(unit, spec)
            trusted = gate.trusted_values(store, identity, [point.position for point in points])
            verdict = gate.evaluate(spec, series, trusted)
            if writes:
                gate.remember(
                    store, spec, identity, points, verdict,
                    run_id=self._info.run_id, recorded_at=time.time(), commit=self._info.commit,
                )  # fmt: skip
        except StoreError as error:
            verdict = Verdict(spec.metric, gate.ERROR, f"{spec.metric}: no history to compare with: {error}")
        return GateRecord(verdict.metric, verdict.verdict, verdict.message, verdict.value)

    def record_durations(self, tests: Sequence[TestResult]) -> str:
        """Store how long every attempt took, outside pull requests; returns a note when that failed. A file of which
        only some nodes ran tells nothing about itself."""
        if self._open is None or self._info.event in ("", "pull_request", "pull_request_target"):
            return ""
        now = time.time()
        try:
            self._opened().record_durations([row for test in tests if not test.only for row in self._rows(test, now)])
        except StoreError as error:
            return f"durations were not stored: {error}"
        return ""

    def _rows(self, test: TestResult, now: float) -> Iterator[DurationRow]:
        info = self._info
        base = DurationRow(
            test=test.unit,
            suite=info.suite,
            backend=info.backend,
            hardware=info.hardware,
            num_gpus=test.num_gpus,
            duration_ms=0,
            outcome="",
            run_id=f"{info.run_id}.{info.run_attempt}",
            recorded_at=now,
            commit=info.commit,
        )
        for attempt in test.attempts:
            ms = round(attempt.wall_s * 1000)
            yield replace(base, duration_ms=ms, outcome=attempt.outcome, attempt=attempt.number)
        # Items matter only where a file is, or may be worth being, split.
        if test.unit != test.path or test.wall_s >= SPLIT_WORTH_S:
            for node, ms in test.node_ms.items():
                last = len(test.attempts)
                yield replace(base, test=node, duration_ms=ms, outcome=test.nodes[node], attempt=last)

    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(StoreError):
                self._store.close()

    def _opened(self) -> HistoryStore:
        if self._open is None:
            raise StoreError("MILES_CI_HISTORY_URL is not set; set it to sqlite:PATH or postgresql://…")
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def _identity(self, unit: RunUnit, spec: GateSpec) -> MetricIdentity:
        info = self._info
        return MetricIdentity(
            unit.path, info.backend, info.suite, info.hardware, unit.num_gpus, spec.metric,
            gate.steps_text(spec.steps), spec.digest,
        )  # fmt: skip
