"""Holds a metric inside a corridor around its own trusted past; trust is earned, never assumed.

A test writes `{"schema": 1, "metric": NAME, "series": [[step, value], ...]}` into `MILES_CI_METRICS_DIR/*.jsonl`;
non-finite values as "NaN", "Infinity", "-Infinity". With v = |x| (magnitude) or x, and ref = the median of the last 10
trusted values, a value passes iff

    ref - max(rel_down * |ref|, abs_down) <= v <= ref + max(rel_up * |ref|, abs_up)

and |x| <= limit where a limit is given, from the first run on. With fewer than `warmup` trusted values the bound is
inactive and values are candidates.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_ci.history.errors import MetricError
from miles_ci.history.records import CANDIDATE, TRUSTED, MetricIdentity, MetricValue
from miles_ci.history.store import HistoryStore
from miles_ci.metric_bound import MetricBound

SCHEMA = 1
WINDOW = 10
PASS, FAIL, INACTIVE, ERROR = "pass", "fail", "inactive", "error"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class MetricVerdict:
    """On one metric: `verdict` pass, fail, inactive or error; `value` of the first point (as measured, signed)."""

    metric: str
    verdict: str
    message: str
    value: float | None = None

    @property
    def blocks(self) -> bool:
        return self.verdict in (FAIL, ERROR)


@dataclass(frozen=True)
class Point:
    """One measured value; `position` is its step, or 0 for the last one."""

    position: int
    value: float


@dataclass(frozen=True)
class Writer:
    """Circumstances of a run that decide whether its values may become history."""

    event: str
    ref: str
    default_branch: str
    cadence: str
    run_attempt: int

    def may_write(self, *, outcome: str, attempts: int) -> bool:
        """Scheduled runs of the default branch, nightly or weekly, first attempt, passed at once. Nobody else."""
        return (
            self.event == "schedule"
            and self.ref == f"refs/heads/{self.default_branch}"
            and self.cadence in ("nightly", "weekly")
            and self.run_attempt == 1
            and attempts == 1
            and outcome == "passed"
        )


def steps_text(steps: str | tuple[int, ...]) -> str:
    return steps if isinstance(steps, str) else ",".join(str(step) for step in steps)


def read_records(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Metric -> its series, from every *.jsonl of the folder. `MetricError` names file, line and fault."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                metric, series = _record(line, f"{path.name}:{number}")
                found.setdefault(metric, []).extend(series)
    return found


def _record(line: str, place: str) -> tuple[str, list[tuple[int, float]]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MetricError(f"{place}: metric record is not JSON: {error}") from error
    if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
        raise MetricError(f'{place}: metric record needs "schema": {SCHEMA}')
    metric, series = record.get("metric"), record.get("series")
    if not isinstance(metric, str) or not metric or not isinstance(series, list):
        raise MetricError(f"{place}: metric record needs a metric name and a series of [step, value]")
    return metric, [_pair(entry, f"{place}: {metric}") for entry in series]


def _pair(entry: Any, place: str) -> tuple[int, float]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise MetricError(f"{place}: {entry!r} is not [step, value]")
    step, value = entry
    if isinstance(step, bool) or not isinstance(step, int):
        raise MetricError(f"{place}: step {step!r} is not an integer")
    if isinstance(value, str) and value in _NON_FINITE:
        return step, _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MetricError(f"{place}: value {value!r} at step {step} is not a number")
    return step, float(value)


def select_points(bound: MetricBound, series: Sequence[tuple[int, float]] | None) -> list[Point]:
    """The values the bound looks at. `MetricError` on a missing metric, empty series, duplicate or missing step, NaN."""
    if series is None:
        raise MetricError(f"{bound.metric}: the test recorded no such metric")
    if not series:
        raise MetricError(f"{bound.metric}: the series is empty")
    by_step: dict[int, float] = {}
    for step, value in series:
        if step in by_step:
            raise MetricError(f"{bound.metric}: step {step} is recorded twice")
        by_step[step] = value
    if bound.steps == "last":
        points = [Point(0, by_step[max(by_step)])]
    elif bound.steps == "all":
        points = [Point(step, by_step[step]) for step in sorted(by_step)]
    else:
        assert not isinstance(bound.steps, str)
        missing = [step for step in bound.steps if step not in by_step]
        if missing:
            raise MetricError(f"{bound.metric}: step {missing[0]} is not recorded")
        points = [Point(step, by_step[step]) for step in bound.steps]
    for point in points:
        if not math.isfinite(point.value):
            raise MetricError(f"{bound.metric}: value {point.value} at position {point.position} is not finite")
    return points


def corridor(bound: MetricBound, reference: float) -> tuple[float, float]:
    size = abs(reference)
    return (
        reference - max(bound.rel_down * size, bound.abs_down),
        reference + max(bound.rel_up * size, bound.abs_up),
    )


def measured(bound: MetricBound, value: float) -> float:
    return abs(value) if bound.magnitude else value


def evaluate(
    bound: MetricBound, series: Sequence[tuple[int, float]] | None, trusted: Mapping[int, Sequence[float]]
) -> MetricVerdict:
    """Judge one metric. `trusted`: position -> trusted values, newest first (signed, as measured)."""
    try:
        points = select_points(bound, series)
    except MetricError as error:
        return MetricVerdict(bound.metric, ERROR, str(error))
    inactive = []
    for point in points:
        bad, active = _judge_point(bound, point, trusted.get(point.position, ()))
        if bad:
            return MetricVerdict(bound.metric, FAIL, bad, point.value)
        if not active:
            inactive.append(point.position)
    if inactive:
        known = min(len(trusted.get(position, ())) for position in inactive)
        message = f"{bound.metric}: {known} of {bound.warmup} trusted values; the value is a candidate"
        return MetricVerdict(bound.metric, INACTIVE, message, points[0].value)
    return MetricVerdict(
        bound.metric, PASS, f"{bound.metric}: {len(points)} value(s) inside the corridor", points[0].value
    )


def _judge_point(bound: MetricBound, point: Point, trusted: Sequence[float]) -> tuple[str, bool]:
    """(why it fails or "", is the corridor active)."""
    where = f"{bound.metric} = {point.value:.6g}" + (f" at step {point.position}" if bound.steps != "last" else "")
    if bound.limit is not None and abs(point.value) > bound.limit:
        return f"{where}: magnitude exceeds the limit {bound.limit:.6g}", False
    if len(trusted) < bound.warmup:
        return "", False
    reference = statistics.median(measured(bound, value) for value in trusted[:WINDOW])
    low, high = corridor(bound, reference)
    if not low <= measured(bound, point.value) <= high:
        side = "magnitude" if bound.magnitude else "value"
        return f"{where}: {side} outside [{low:.6g}, {high:.6g}] around {reference:.6g}", True
    return "", True


def coherent(bound: MetricBound, values: Iterable[float]) -> bool:
    """Do all values lie in the corridor of their own median? Then they may be trusted without a person."""
    sizes = [measured(bound, value) for value in values]
    low, high = corridor(bound, statistics.median(sizes))
    return all(low <= size <= high for size in sizes)


def trusted_values(store: HistoryStore, identity: MetricIdentity, positions: Iterable[int]) -> dict[int, list[float]]:
    return {
        position: [row.value for row in store.values(identity, state=TRUSTED, limit=WINDOW, position=position)]
        for position in positions
    }


def remember(
    store: HistoryStore,
    bound: MetricBound,
    identity: MetricIdentity,
    points: Sequence[Point],
    verdict: MetricVerdict,
    *,
    run_id: str,
    recorded_at: float,
    commit: str = "",
) -> int:
    """Store the values of a run that may write: trusted when they passed, else candidates. Then promote what has
    earned it. Returns how many candidates became trusted."""
    state = TRUSTED if verdict.verdict == PASS else CANDIDATE
    store.record_values(
        [MetricValue(identity, p.value, run_id, recorded_at, state, p.position, commit) for p in points]
    )
    if verdict.verdict != INACTIVE:
        return 0
    promoted = 0
    for point in points:
        if len(store.values(identity, state=TRUSTED, limit=bound.warmup, position=point.position)) >= bound.warmup:
            continue
        rows = store.values(identity, state=CANDIDATE, limit=bound.warmup, position=point.position)
        if len(rows) == bound.warmup and coherent(bound, [row.value for row in rows]):
            promoted += store.promote(identity, position=point.position, run_ids=[row.run_id for row in rows])
    return promoted
