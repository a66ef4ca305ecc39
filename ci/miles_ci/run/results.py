"""The record of one shard: `results.json` (schema 1) and `observed.json`, written again after every test.

Whoever reads a file finds a whole one: temporary name, fsync, rename. A run that dies leaves `status` at `running`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles_ci.errors import ExitCode, UsageError, combine_exit_codes
from miles_ci.files import write_whole
from miles_ci.history.corridor import MetricVerdict
from miles_ci.valid_text import valid_text

SCHEMA = 2
RESULTS_NAME = "results.json"
OBSERVED_NAME = "observed.json"
# Folders of repetitions, inside the shard's.
RERUN_PREFIX = "rerun-"

PASSED, FAILED, ERROR, TIMEOUT = "passed", "failed", "error", "timeout"
NO_TESTS, ALL_SKIPPED, DECLARATION_ERROR, INFRA = "no_tests", "all_skipped", "declaration_error", "infra"
FLAKY, UNSTABLE_FAILED, CANCELLED, NOT_RUN = "flaky", "unstable_failed", "cancelled", "not_run"
OUTCOMES = (
    PASSED, FAILED, ERROR, TIMEOUT, NO_TESTS, ALL_SKIPPED, DECLARATION_ERROR, INFRA, FLAKY, UNSTABLE_FAILED, CANCELLED,
    NOT_RUN,
)  # fmt: skip
THEN_PASSED = "failed, then passed (flaky)"
DIED = "the runner died before it finished"
_EXIT = {
    FAILED: ExitCode.TEST_FAILURE,
    ERROR: ExitCode.TEST_FAILURE,
    TIMEOUT: ExitCode.TEST_FAILURE,
    NO_TESTS: ExitCode.TEST_FAILURE,
    ALL_SKIPPED: ExitCode.TEST_FAILURE,
    DECLARATION_ERROR: ExitCode.CONFIG,
    INFRA: ExitCode.INFRA,
    NOT_RUN: ExitCode.INFRA,
    CANCELLED: ExitCode.INTERRUPTED,
}


@dataclass(frozen=True)
class FailureRecord:
    """One failing node. `frame` is the deepest one in the repository, `file:function:line`."""

    node: str
    type: str
    message: str
    signature: str
    frame: str = ""


@dataclass(frozen=True)
class Attempt:
    """One execution of a unit. `cause` is the retry class and what matched, empty when it passed."""

    number: int
    outcome: str
    wall_s: float
    message: str = ""
    exit_code: int | None = None
    signal: int | None = None
    cause: str = ""
    cause_kind: str = ""
    action: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[FailureRecord, ...] = ()
    leaked: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    log: str = ""
    max_rss_mib: int = 0


@dataclass(frozen=True)
class TestResult:
    """One unit with all its attempts. `nodes`: id -> outcome of the last attempt's items, `node_ms` their durations,
    `subtests`: how many of an item's subtests ended how.
    `reruns`: outcomes of repetitions that only tell flaky from broken.
    `tolerated`: why a bad outcome does not block (declared reason), else empty.
    `never_executed`: items that pytest made and did not run -> by whom left out; `allowed`: those of which the
    declaration says so, with its reason.
    `only`: the nodes to which `--file` narrowed it, so that it says nothing about the whole unit; else empty."""

    __test__ = False

    unit: str
    path: str
    outcome: str
    num_gpus: int = 0
    est_s: float = 0.0
    message: str = ""
    tolerated: str = ""
    attempts: tuple[Attempt, ...] = ()
    metrics: tuple[MetricVerdict, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    node_ms: Mapping[str, int] = field(default_factory=dict)
    subtests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reruns: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    never_executed: Mapping[str, str] = field(default_factory=dict)
    allowed: Mapping[str, str] = field(default_factory=dict)

    @property
    def blocks(self) -> bool:
        return (
            (self.outcome in _EXIT and not self.tolerated)
            or bool(self.never_executed)
            or any(metric.blocks for metric in self.metrics)
        )

    @property
    def wall_s(self) -> float:
        return sum(attempt.wall_s for attempt in self.attempts)

    def exit_code(self) -> int:
        codes = [] if self.tolerated else [_EXIT.get(self.outcome, ExitCode.OK)]
        if self.never_executed:
            codes.append(ExitCode.NEVER_EXECUTED)
        if any(metric.blocks for metric in self.metrics):
            codes.append(ExitCode.METRIC_BOUND)
        return combine_exit_codes(codes)


@dataclass(frozen=True)
class Provisional:
    """A file all of whose tests have reported while its process still runs. Not judged, so never a result."""

    unit: str
    path: str
    counts: Mapping[str, int]
    failures: tuple[FailureRecord, ...] = ()


@dataclass(frozen=True)
class RunInfo:
    """Where and for what this shard ran. Times are UTC seconds since the epoch."""

    suite: str
    backend: str
    hardware: str
    shard: str
    plan_digest: str
    cadence: str
    run_id: str
    run_attempt: int
    commit: str
    event: str
    ref: str
    runner: str
    host: str
    started_at: float


@dataclass
class ShardResults:
    """Everything known about the shard so far. `provisional`: by unit, only while the shard runs."""

    info: RunInfo
    tests: list[TestResult] = field(default_factory=list)
    devices: list[Mapping[str, Any]] = field(default_factory=list)
    status: str = "running"
    notes: list[str] = field(default_factory=list)
    ended_at: float | None = None
    provisional: dict[str, Provisional] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        counts = dict.fromkeys(OUTCOMES, 0)
        for test in self.tests:
            counts[test.outcome] += 1
        return counts

    def exit_code(self) -> int:
        codes: list[int] = [test.exit_code() for test in self.tests]
        if self.status == "interrupted":
            codes.append(ExitCode.INTERRUPTED)
        if self.status == "running":
            # Read from a file this means that the runner died; what it had not recorded is unknown.
            codes.append(ExitCode.INFRA)
        return combine_exit_codes(codes)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "status": self.status,
            "exit_code": self.exit_code(),
            "run": {**asdict(self.info), "ended_at": self.ended_at},
            "devices": list(self.devices),
            "counts": self.counts(),
            "notes": list(self.notes),
            "tests": [asdict(test) for test in sorted(self.tests, key=lambda test: test.unit)],
            "provisional": [asdict(self.provisional[unit]) for unit in sorted(self.provisional)],
        }

    def observed_json(self) -> dict[str, Any]:
        """What was really run: units and node ids. A unit that never started is not observed."""
        return {
            "schema": SCHEMA,
            "plan_digest": self.info.plan_digest,
            "suite": self.info.suite,
            "shard": self.info.shard,
            "units": {
                test.unit: {
                    "path": test.path,
                    "outcome": test.outcome,
                    "nodes": dict(test.nodes),
                    "only": list(test.only),
                    "never_executed": dict(test.never_executed),
                }
                for test in sorted(self.tests, key=lambda test: test.unit)
                if test.outcome not in (NOT_RUN, CANCELLED)
            },
        }

    def write(self, folder: Path) -> None:
        write_json(folder / RESULTS_NAME, self.as_json())
        write_json(folder / OBSERVED_NAME, self.observed_json())


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_results(path: Path) -> ShardResults:
    """Read a results.json back; `UsageError` names the file and what is wrong with it."""
    try:
        data = valid_text(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"{path}: results schema {found!r} is not supported; this harness reads schema {SCHEMA}")
    try:
        run = dict(data["run"])
        ended_at = run.pop("ended_at")
        tests = [_test(entry) for entry in data["tests"]]
        reported = {entry["unit"]: _provisional(entry) for entry in data.get("provisional", [])}
        return ShardResults(RunInfo(**run), tests, data["devices"], data["status"], data["notes"], ended_at, reported)
    except (KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}: damaged results file: {why}; run the shard again") from error


def _test(entry: Mapping[str, Any]) -> TestResult:
    fields = dict(entry)
    if fields["outcome"] not in OUTCOMES:
        raise ValueError(f"outcome {fields['outcome']!r} is not known")
    fields["attempts"] = tuple(_attempt(attempt) for attempt in fields["attempts"])
    fields["metrics"] = tuple(MetricVerdict(**metric) for metric in fields["metrics"])
    for name in ("reruns", "only"):
        fields[name] = tuple(fields.get(name, ()))
    return TestResult(**fields)


def _attempt(entry: Mapping[str, Any]) -> Attempt:
    fields = dict(entry)
    fields["failures"] = tuple(FailureRecord(**failure) for failure in fields["failures"])
    for name in ("leaked", "devices"):
        fields[name] = tuple(fields[name])
    return Attempt(**fields)


def _provisional(entry: Mapping[str, Any]) -> Provisional:
    return Provisional(**{**entry, "failures": tuple(FailureRecord(**failure) for failure in entry["failures"])})


def exit_code_of(shards: Iterable[ShardResults]) -> int:
    return combine_exit_codes(shard.exit_code() for shard in shards)
