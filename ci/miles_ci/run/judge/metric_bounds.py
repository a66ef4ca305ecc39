"""The metric bounds of one unit after it has passed: read what it recorded, judge, and remember where allowed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from miles_ci.history import corridor
from miles_ci.history.corridor import MetricVerdict, Writer
from miles_ci.history.errors import MetricError, StoreError
from miles_ci.history.records import DurationRow, MetricIdentity
from miles_ci.history.store import HistoryStore
from miles_ci.metric_bound import MetricBound
from miles_ci.plan.model import Unit
from miles_ci.run import results
from miles_ci.run.results import RunInfo, TestResult
from miles_ci.run.slug import slug

SPLIT_WORTH_S = 30.0


class MetricJudge:
    """Judges metrics for one shard. Opens the store at the first unit with a bound; without a store such a unit is an
    error, never a silent pass."""

    def __init__(self, info: RunInfo, open_store: Callable[[], HistoryStore] | None, default_branch: str) -> None:
        self._info = info
        self._open = open_store
        self._store: HistoryStore | None = None
        self._lock = threading.Lock()
        self._writer = Writer(info.event, info.ref, default_branch, info.cadence, info.run_attempt)

    def judge(self, unit: Unit, metrics: Path, *, outcome: str, attempts: int) -> list[MetricVerdict]:
        """Verdicts of all bounds of a unit that passed; `metrics` is the folder of its process."""
        if not unit.metric_bounds or outcome not in (results.PASSED, results.FLAKY):
            return []
        try:
            records = corridor.read_records(metrics / slug(unit.path))
        except MetricError as error:
            return [MetricVerdict(bound.metric, corridor.ERROR, str(error)) for bound in unit.metric_bounds]
        writes = self._writer.may_write(outcome=outcome, attempts=attempts)
        return [self._one(unit, bound, records.get(bound.metric), writes) for bound in unit.metric_bounds]

    def _one(
        self, unit: Unit, bound: MetricBound, series: Sequence[tuple[int, float]] | None, writes: bool
    ) -> MetricVerdict:
        try:
            points = corridor.select_points(bound, series)
        except MetricError as error:
            return MetricVerdict(bound.metric, corridor.ERROR, str(error))
        try:
            store = self._opened()
            identity = self._identity(unit, bound)
            trusted = corridor.trusted_values(store, identity, [point.position for point in points])
            verdict = corridor.evaluate(bound, series, trusted)
            if writes:
                corridor.remember(
                    store, bound, identity, points, verdict,
                    run_id=self._info.run_id, recorded_at=time.time(), commit=self._info.commit,
                )  # fmt: skip
        except StoreError as error:
            verdict = MetricVerdict(
                bound.metric, corridor.ERROR, f"{bound.metric}: no history to compare with: {error}"
            )
        return verdict

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

    def _identity(self, unit: Unit, bound: MetricBound) -> MetricIdentity:
        info = self._info
        return MetricIdentity(
            unit.path, info.backend, info.suite, info.hardware, unit.devices, bound.metric,
            corridor.steps_text(bound.steps), bound.digest,
        )  # fmt: skip
