"""Holds a metric inside a corridor around its own trusted past; trust is earned, never assumed.

A test writes `{"schema": 1, "metric": NAME, "series": [[step, value], ...]}` into `MILES_CI_METRICS_DIR/*.jsonl`;
non-finite values as "NaN", "Infinity", "-Infinity". With v = |x| (magnitude) or x, and ref = the median of the last 10
trusted values, a value passes iff

    ref - max(rel_down * |ref|, abs_down) <= v <= ref + max(rel_up * |ref|, abs_up)

and |x| <= limit where a limit is given, from the first run on. With fewer than `warmup` trusted values the gate is
inactive and values are candidates.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_ci.history.errors import GateError
from miles_ci.history.records import CANDIDATE, TRUSTED, MetricIdentity, MetricValue
from miles_ci.history.store import HistoryStore

SCHEMA = 1
WINDOW = 10
PASS, FAIL, INACTIVE, ERROR = "pass", "fail", "inactive", "error"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class GateSpec(Protocol):
    """What `register_ci_gate` declares (`miles_ci.declare.model.GateDeclaration`)."""

    @property
    def metric(self) -> str: ...
    @property
    def steps(self) -> str | tuple[int, ...]: ...
    @property
    def magnitude(self) -> bool: ...
    @property
    def rel_up(self) -> float: ...
    @property
    def abs_up(self) -> float: ...
    @property
    def rel_down(self) -> float: ...
    @property
    def abs_down(self) -> float: ...
    @property
    def limit(self) -> float | None: ...
    @property
    def warmup(self) -> int: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class DeclaredGate:
    """A gate as a plan carries it."""

    metric: str
    steps: str | tuple[int, ...]
    magnitude: bool
    rel_up: float
    abs_up: float
    rel_down: float
    abs_down: float
    limit: float | None
    warmup: int
    digest: str

    @classmethod
    def from_plan(cls, entry: Mapping[str, Any]) -> DeclaredGate:
        """From the plan's JSON form. `GateError` for an entry that is not a gate."""
        try:
            values = {name: entry[name] for name in cls.__dataclass_fields__}
        except KeyError as error:
            raise GateError(f"the plan holds a gate without {error}") from error
        if not isinstance(values["steps"], str):
            values["steps"] = tuple(values["steps"])
        return cls(**values)


@dataclass(frozen=True)
class Verdict:
    """`verdict` pass, fail, inactive or error; `value` of the first point (as measured, signed)."""

    metric: str
    verdict: str
    message: str
    value: float | None = None


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
    """Metric -> its series, from every *.jsonl of the folder. `GateError` names file, line and fault."""
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
        raise GateError(f"{place}: metric record is not JSON: {error}") from error
    if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
        raise GateError(f'{place}: metric record needs "schema": {SCHEMA}')
    metric, series = record.get("metric"), record.get("series")
    if not isinstance(metric, str) or not metric or not isinstance(series, list):
        raise GateError(f"{place}: metric record needs a metric name and a series of [step, value]")
    return metric, [_pair(entry, f"{place}: {metric}") for entry in series]


def _pair(entry: Any, place: str) -> tuple[int, float]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise GateError(f"{place}: {entry!r} is not [step, value]")
    step, value = entry
    if isinstance(step, bool) or not isinstance(step, int):
        raise GateError(f"{place}: step {step!r} is not an integer")
    if isinstance(value, str) and value in _NON_FINITE:
        return step, _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GateError(f"{place}: value {value!r} at step {step} is not a number")
    return step, float(value)


def select_points(spec: GateSpec, series: Sequence[tuple[int, float]] | None) -> list[Point]:
    """The values the gate looks at. `GateError` on a missing metric, empty series, duplicate or missing step, NaN."""
    if series is None:
        raise GateError(f"{spec.metric}: the test recorded no such metric")
    if not series:
        raise GateError(f"{spec.metric}: the series is empty")
    by_step: dict[int, float] = {}
    for step, value in series:
        if step in by_step:
            raise GateError(f"{spec.metric}: step {step} is recorded twice")
        by_step[step] = value
    if spec.steps == "last":
        points = [Point(0, by_step[max(by_step)])]
    elif spec.steps == "all":
        points = [Point(step, by_step[step]) for step in sorted(by_step)]
    else:
        assert not isinstance(spec.steps, str)
        missing = [step for step in spec.steps if step not in by_step]
        if missing:
            raise GateError(f"{spec.metric}: step {missing[0]} is not recorded")
        points = [Point(step, by_step[step]) for step in spec.steps]
    for point in points:
        if not math.isfinite(point.value):
            raise GateError(f"{spec.metric}: value {point.value} at position {point.position} is not finite")
    return points


def corridor(spec: GateSpec, reference: float) -> tuple[float, float]:
    size = abs(reference)
    return (
        reference - max(spec.rel_down * size, spec.abs_down),
        reference + max(spec.rel_up * size, spec.abs_up),
    )


def measured(spec: GateSpec, value: float) -> float:
    return abs(value) if spec.magnitude else value


def evaluate(
    spec: GateSpec, series: Sequence[tuple[int, float]] | None, trusted: Mapping[int, Sequence[float]]
) -> Verdict:
    """Judge one metric. `trusted`: position -> trusted values, newest first (signed, as measured)."""
    try:
        points = select_points(spec, series)
    except GateError as error:
        return Verdict(spec.metric, ERROR, str(error))
    inactive = []
    for point in points:
        bad, active = _judge_point(spec, point, trusted.get(point.position, ()))
        if bad:
            return Verdict(spec.metric, FAIL, bad, point.value)
        if not active:
            inactive.append(point.position)
    if inactive:
        known = min(len(trusted.get(position, ())) for position in inactive)
        message = f"{spec.metric}: {known} of {spec.warmup} trusted values; the value is a candidate"
        return Verdict(spec.metric, INACTIVE, message, points[0].value)
    return Verdict(spec.metric, PASS, f"{spec.metric}: {len(points)} value(s) inside the corridor", points[0].value)


def _judge_point(spec: GateSpec, point: Point, trusted: Sequence[float]) -> tuple[str, bool]:
    """(why it fails or "", is the corridor active)."""
    where = f"{spec.metric} = {point.value:.6g}" + (f" at step {point.position}" if spec.steps != "last" else "")
    if spec.limit is not None and abs(point.value) > spec.limit:
        return f"{where}: magnitude exceeds the limit {spec.limit:.6g}", False
    if len(trusted) < spec.warmup:
        return "", False
    reference = statistics.median(measured(spec, value) for value in trusted[:WINDOW])
    low, high = corridor(spec, reference)
    if not low <= measured(spec, point.value) <= high:
        side = "magnitude" if spec.magnitude else "value"
        return f"{where}: {side} outside [{low:.6g}, {high:.6g}] around {reference:.6g}", True
    return "", True


def coherent(spec: GateSpec, values: Iterable[float]) -> bool:
    """Do all values lie in the corridor of their own median? Then they may be trusted without a person."""
    sizes = [measured(spec, value) for value in values]
    low, high = corridor(spec, statistics.median(sizes))
    return all(low <= size <= high for size in sizes)


def trusted_values(store: HistoryStore, identity: MetricIdentity, positions: Iterable[int]) -> dict[int, list[float]]:
    return {
        position: [row.value for row in store.values(identity, state=TRUSTED, limit=WINDOW, position=position)]
        for position in positions
    }


def remember(
    store: HistoryStore,
    spec: GateSpec,
    identity: MetricIdentity,
    points: Sequence[Point],
    verdict: Verdict,
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
        if len(store.values(identity, state=TRUSTED, limit=spec.warmup, position=point.position)) >= spec.warmup:
            continue
        rows = store.values(identity, state=CANDIDATE, limit=spec.warmup, position=point.position)
        if len(rows) == spec.warmup and coherent(spec, [row.value for row in rows]):
            promoted += store.promote(identity, position=point.position, run_ids=[row.run_id for row in rows])
    return promoted
