"""Learn durations from history or results, report how declared estimates drift, rewrite them in the sources.

`tune --source` changes exactly the characters of the `est_time` literal and nothing else in a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_ci.declare.model import Declaration
from miles_ci.errors import UsageError
from miles_ci.files import write_whole
from miles_ci.plan.durations import MIN_OBSERVATIONS, Durations, Key, Learned, Observation
from miles_ci.registry.model import Fleet
from miles_ci.select.registrations import Catalog, Registration

REWRITE_FACTOR = 1.5
DRIFT_FACTOR = 2.0
DRIFT_MIN_MS = 10_000
PLACEHOLDER_SHARE = 0.2
PLACEHOLDER_MIN_TESTS = 10
_NEWLINE = re.compile(rb"\r\n|\n|\r")

# Of `results.json`, which `run` writes: it stands above this package, and a test compares the two numbers.
RESULTS_SCHEMA = 2


def merge(old: Durations, new: Mapping[Key, Learned]) -> Durations:
    """The new table: an entry is replaced when its successor can be relied on, or knows more than it."""
    entries = dict(old.entries)
    for key, item in new.items():
        known = entries.get(key)
        if known is None or item.count >= MIN_OBSERVATIONS or item.count > known.count:
            entries[key] = item
    return Durations(entries)


def prune(table: Durations, catalog: Catalog) -> Durations:
    """Without entries of tests that no longer exist or moved to another suite, and without the items of files that
    are never split: nobody reads them, and they are most of the table."""
    divided = {(item.path, item.suite): item.declaration.split for item in catalog.registrations}
    faulty = {fault.path for fault in catalog.faults}
    kept = {key: item for key, item in table.entries.items() if key[:2] in divided or key[0] in faulty}
    return Durations(
        {key: item if divided.get(key[:2], True) else replace(item, items={}) for key, item in kept.items()}
    )


def observations_of_results(paths: Sequence[Path]) -> Iterator[Observation]:
    """Passing runs recorded in `results.json` files. Raises `UsageError` for another file.

    A part of a split file, or a file of which only some nodes ran, tells about its items only, never about the whole
    file. Copies of one run count once.
    """
    runs: set[tuple[Any, ...]] = set()
    for path in paths:
        try:
            data = json.loads(path.read_bytes())
            if data.get("schema") != RESULTS_SCHEMA:
                raise ValueError(f"schema is {data.get('schema')!r}, not {RESULTS_SCHEMA}")
            info = data["run"]
            # Two runs of a suite may share a run's id (jobs of one workflow), but not the moment they started.
            run = tuple(info.get(name) for name in ("run_id", "run_attempt", "suite", "shard", "started_at"))
            if run in runs:
                continue
            runs.add(run)
            for test in data["tests"]:
                if test["outcome"] == "passed":
                    yield from _of_test(test, info["suite"], info["hardware"], float(info["started_at"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"{path}: no results of schema {RESULTS_SCHEMA}: {why}; give a results.json that `miles-ci run` wrote"
            ) from error


def _of_test(test: Mapping[str, Any], suite: str, hardware: str, at: float) -> Iterator[Observation]:
    if "#" not in test["unit"] and not test.get("only"):
        ms = round(test["attempts"][-1]["wall_s"] * 1000)
        yield Observation(test["path"], suite, hardware, ms, at)
    for node, ms in test.get("node_ms", {}).items():
        if test.get("nodes", {}).get(node) == "passed":
            yield Observation(test["path"], suite, hardware, int(ms), at, item=node)


def learned_of_history(
    fleet: Fleet, passing: Mapping[str, Mapping[tuple[str, str], list[int]]], day: str
) -> dict[Key, Learned]:
    """Medians from a history store: hardware model -> (suite, test) -> durations, newest first.

    Node ids (`path::name`) become the items of their file.
    """
    files: dict[Key, list[int]] = {}
    items: dict[Key, dict[str, int | None]] = {}
    for hardware, table in passing.items():
        for (suite, test), values in table.items():
            if suite not in fleet.suites or not values:
                continue
            path = test.split("::", 1)[0]
            key = (path, suite, hardware)
            if "::" in test:
                items.setdefault(key, {})[test] = _median(values)
            elif "#" not in test:
                files[key] = values
    return {key: Learned(_median(values), len(values), day, items.get(key, {})) for key, values in files.items()}


def _median(values: Sequence[int]) -> int:
    ordered = sorted(values)
    return max(1, ordered[(len(ordered) - 1) // 2])


@dataclass(frozen=True, slots=True)
class Drift:
    """A declared estimate beside what was observed, in milliseconds."""

    path: str
    suite: str
    hardware: str
    declared_ms: int
    observed_ms: int
    count: int

    @property
    def ratio(self) -> float:
        return self.observed_ms / self.declared_ms

    @property
    def notable(self) -> bool:
        """More than twice or less than half, and more than 10 s apart."""
        apart = abs(self.observed_ms - self.declared_ms)
        return (self.ratio > DRIFT_FACTOR or self.ratio < 1 / DRIFT_FACTOR) and apart > DRIFT_MIN_MS


def drifts(catalog: Catalog, fleet: Fleet, durations: Durations) -> list[Drift]:
    """Every declared and observed test, largest ratio (either way) first."""
    found = []
    for item in catalog.registrations:
        declared = item.declaration.est_time
        if declared is None:
            continue
        for hardware in fleet.suites[item.suite].hardware:
            learned = durations.get(item.path, item.suite, hardware)
            if learned is not None:
                ms = max(1, round(declared * 1000))
                found.append(Drift(item.path, item.suite, hardware, ms, learned.ms, learned.count))
                break
    return sorted(found, key=lambda drift: (-max(drift.ratio, 1 / drift.ratio), drift.path, drift.suite))


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One `est_time` that so many tests of a suite share that it cannot be a measurement."""

    suite: str
    est_time: float
    tests: int
    total: int


def placeholders(registrations: Iterable[Registration]) -> list[Placeholder]:
    """Values that cover more than 20 % of the declared tests of a suite with at least 10 of them."""
    by_suite: dict[str, list[float]] = {}
    for item in registrations:
        if item.declaration.est_time is not None:
            by_suite.setdefault(item.suite, []).append(item.declaration.est_time)
    found = []
    for suite, values in sorted(by_suite.items()):
        if len(values) < PLACEHOLDER_MIN_TESTS:
            continue
        for value in sorted(set(values)):
            count = values.count(value)
            if count > PLACEHOLDER_SHARE * len(values):
                found.append(Placeholder(suite, value, count, len(values)))
    return found


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One `est_time` literal to change."""

    declaration: Declaration
    old: str
    new: str


def rewrites(root: Path, catalog: Catalog, fleet: Fleet, durations: Durations) -> list[Rewrite]:
    """Literals whose observed/declared ratio lies outside [1/1.5, 1.5]."""
    found = []
    wanted = {(drift.path, drift.suite): drift for drift in drifts(catalog, fleet, durations)}
    for item in catalog.registrations:
        drift = wanted.get((item.path, item.suite))
        if drift is None or item.declaration.est_span is None:
            continue
        if 1 / REWRITE_FACTOR <= drift.ratio <= REWRITE_FACTOR:
            continue
        data = (root / item.path).read_bytes()
        start, end = _span(data, item.declaration)
        found.append(Rewrite(item.declaration, data[start:end].decode(), _literal(drift.observed_ms)))
    return found


def _literal(ms: int) -> str:
    """Seconds with as many digits as mean something."""
    if ms >= 10_000:
        return str(round(ms / 1000))
    return f"{max(ms, 1) / 1000:.1f}" if ms >= 100 else f"{max(ms, 1) / 1000:.3f}"


def _span(data: bytes, declaration: Declaration) -> tuple[int, int]:
    """Byte offsets of the literal in the file as it lies on disk (a byte-order mark is not part of line 1)."""
    assert declaration.est_span is not None
    starts = [3 if data.startswith(b"\xef\xbb\xbf") else 0, *(match.end() for match in _NEWLINE.finditer(data))]
    line, column, end_line, end_column = declaration.est_span
    return starts[line - 1] + column, starts[end_line - 1] + end_column


def apply_rewrites(root: Path, changes: Sequence[Rewrite]) -> list[str]:
    """Write the new literals, each file atomically; returns the changed paths.

    Raises `UsageError` when a file no longer holds the literal at its place.
    """
    by_path: dict[str, list[Rewrite]] = {}
    for change in changes:
        by_path.setdefault(change.declaration.path, []).append(change)
    for path, items in sorted(by_path.items()):
        data = (root / path).read_bytes()
        for item in sorted(items, key=lambda change: change.declaration.est_span or (0, 0, 0, 0), reverse=True):
            start, end = _span(data, item.declaration)
            if data[start:end].decode(errors="replace") != item.old:
                raise UsageError(f"{path}:{item.declaration.line}: changed while it was being tuned; run tune again")
            data = data[:start] + item.new.encode() + data[end:]
        write_whole(root / path, data, mode=(root / path).stat().st_mode & 0o7777)
    return sorted(by_path)
