"""The plan: which test runs where, as frozen records that are JSON, with a digest over all of it.

A plan is computed once, uploaded, and run by every shard; a shard that is handed another plan refuses it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from miles_ci.errors import PlanMismatch, UsageError
from miles_ci.files import write_output
from miles_ci.metric_bound import MetricBound

SCHEMA = 2
TEST, DECLARATION_ERROR = "test", "declaration-error"


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing a runner starts: a test file, a part of a split file, or a declaration error to report.

    `nodes` names the only node ids to run (None: the whole file); `deselect` those that other parts run.
    `unstable` is the reason why a failure does not block. `ms` is the estimate; `timeout_s` is resolved and capped by the suite. `devices` is the lease.
    `allow_never_executed`: (item, class or function of the file, reason why it need not run).
    `narrowed`: somebody asked for `nodes` only, so this is not the planned unit; no plan holds such a unit.
    """

    id: str
    path: str
    suite: str
    kind: str
    ms: int
    est_source: str
    devices: int
    timeout_s: int
    serial: bool = False
    unstable: str | None = None
    notify: str | None = None
    min_memory_gib: float | None = None
    capabilities: tuple[str, ...] = ()
    allow_all_skipped: str | None = None
    allow_never_executed: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] | None = None
    deselect: tuple[str, ...] = ()
    metric_bounds: tuple[MetricBound, ...] = ()
    errors: tuple[str, ...] = ()
    narrowed: bool = False

    @property
    def declaration_error(self) -> str | None:
        """Why this unit starts no process and is a failed entry; None for a test."""
        if self.kind != DECLARATION_ERROR:
            return None
        return "; ".join(self.errors) or "the declaration is faulty"

    @property
    def only(self) -> tuple[str, ...]:
        """The nodes to which `--file` narrowed it; empty for the whole planned unit."""
        return (self.nodes or ()) if self.narrowed else ()

    def targets(self) -> list[str]:
        """Arguments that make pytest run this unit and nothing else."""
        if self.nodes:
            return list(self.nodes)
        return [self.path, *(f"--runs-elsewhere={node}" for node in self.deselect)]


@dataclass(frozen=True, slots=True)
class Shard:
    """Units of one runner in start order. `runs_on` are its labels; `index` counts from 1 to `count`. Where a number
    of shards was asked for that exceeds that of the tests, those after the last test are not part of the plan."""

    suite: str
    index: int
    count: int
    backend: str
    hardware: str
    pool: str | None
    runs_on: tuple[str, ...]
    width: int
    load_ms: int
    timeout_s: int
    units: tuple[Unit, ...]

    @property
    def id(self) -> str:
        return f"{self.suite}-{self.index}-of-{self.count}"


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """Summary of one suite. With `selected` = 0 no runner is asked for and `reason` says why."""

    suite: str
    backend: str
    selected: int
    shards: int
    reason: str | None
    makespan_ms: int
    lower_bound_ms: int
    ratio: float
    target_wall_ms: int
    setup_ms: int
    over_target: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A whole run. `excluded` holds (id, suite or None, reason codes) of everything that does not run."""

    cadence: str
    labels: tuple[str, ...]
    bypass_fastfail: bool
    write_baseline: bool
    source: str | None
    affected: str | None
    suites: tuple[SuitePlan, ...]
    shards: tuple[Shard, ...]
    excluded: tuple[tuple[str, str | None, tuple[str, ...]], ...]
    warnings: tuple[str, ...]

    def suite(self, suite_id: str) -> SuitePlan:
        for item in self.suites:
            if item.suite == suite_id:
                return item
        raise UsageError(f"suite '{suite_id}' is not part of the plan")

    def shards_of(self, suite_id: str) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.suite == suite_id)

    def shard(self, suite_id: str, index: int) -> Shard:
        """One shard. Raises `UsageError` when the plan has none of that number."""
        for item in self.shards_of(suite_id):
            if item.index == index:
                return item
        count = len(self.shards_of(suite_id))
        raise UsageError(f"shard {index} of suite '{suite_id}' is not part of the plan, which has {count}")

    def _body(self) -> dict[str, Any]:
        # Written out instead of `asdict`, whose deep copies take longer than planning 10,000 tests.
        body = {name: getattr(self, name) for name in _PLAN_FIELDS}
        body["schema"] = SCHEMA
        body["suites"] = [{name: getattr(item, name) for name in _SUITE_FIELDS} for item in self.suites]
        body["shards"] = [
            {
                **{name: getattr(shard, name) for name in _SHARD_FIELDS},
                "units": [_unit_body(unit) for unit in shard.units],
            }
            for shard in self.shards
        ]
        return body

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of everything else in the plan."""
        return hashlib.sha256(_canonical(self._body())).hexdigest()

    def as_json(self) -> dict[str, Any]:
        body = self._body()
        return {**body, "digest": hashlib.sha256(_canonical(body)).hexdigest()}

    def outputs(self) -> dict[str, str]:
        """Outputs of the plan job: `<suite>-count`, `<suite>-shards` (JSON list of numbers), digest, …"""
        result = {"digest": self.digest, "cadence": self.cadence}
        result["bypass_fastfail"] = "true" if self.bypass_fastfail else "false"
        result["write_baseline"] = "true" if self.write_baseline else "false"
        for item in self.suites:
            shards = self.shards_of(item.suite)
            result[f"{item.suite}-count"] = str(item.selected)
            result[f"{item.suite}-shards"] = json.dumps([shard.index for shard in shards], separators=(",", ":"))
            result[f"{item.suite}-runs-on"] = json.dumps([list(s.runs_on) for s in shards], separators=(",", ":"))
        result["gpu-count"] = str(sum(item.selected for item in self.suites if item.backend != "cpu"))
        return result

    def save(self, path: Path) -> None:
        """Write as `miles_ci.files.write_output` does."""
        text = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        write_output(path, f"{text}\n".encode())

    @classmethod
    def load(cls, path: Path, *, digest: str | None = None) -> Plan:
        """Read a saved plan and verify it.

        Raises `UsageError` when it cannot be read, `PlanMismatch` (exit code 5) when its content does not
        match its own digest or the one that is asked for.
        """
        try:
            data = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: the plan cannot be read: {error}") from error
        return plan_from_json(data, shown_as=str(path), digest=digest)


_PLAN_FIELDS = tuple(item.name for item in fields(Plan))
_SUITE_FIELDS = tuple(item.name for item in fields(SuitePlan))
_SHARD_FIELDS = tuple(item.name for item in fields(Shard))
_UNIT_FIELDS = tuple(item.name for item in fields(Unit) if item.name != "narrowed")


def _unit_body(unit: Unit) -> dict[str, Any]:
    body = {name: getattr(unit, name) for name in _UNIT_FIELDS}
    body["metric_bounds"] = [bound.spec() for bound in unit.metric_bounds]
    return body


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def plan_from_json(data: Any, *, shown_as: str = "plan", digest: str | None = None) -> Plan:
    """The plan behind its JSON form; see `Plan.load`."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"{shown_as}: not a plan of schema {SCHEMA}")
    body = {key: value for key, value in data.items() if key != "digest"}
    actual = hashlib.sha256(_canonical(body)).hexdigest()
    if data.get("digest") != actual:
        raise PlanMismatch(f"{shown_as}: the content does not match its digest; the plan was altered after planning")
    if digest is not None and digest != actual:
        raise PlanMismatch(f"{shown_as}: has digest {actual[:16]}…, this shard must run plan {digest[:16]}…")
    try:
        return Plan(
            cadence=data["cadence"],
            labels=tuple(data["labels"]),
            bypass_fastfail=data["bypass_fastfail"],
            write_baseline=data["write_baseline"],
            source=data["source"],
            affected=data["affected"],
            suites=tuple(SuitePlan(**{**item, "over_target": tuple(item["over_target"])}) for item in data["suites"]),
            shards=tuple(_shard(item) for item in data["shards"]),
            excluded=tuple((item[0], item[1], tuple(item[2])) for item in data["excluded"]),
            warnings=tuple(data["warnings"]),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{shown_as}: not a plan of schema {SCHEMA}: {error}") from error


def _shard(item: dict[str, Any]) -> Shard:
    units = tuple(_unit(unit) for unit in item["units"])
    return Shard(**{**item, "runs_on": tuple(item["runs_on"]), "units": units})


def _unit(item: dict[str, Any]) -> Unit:
    values = dict(item)
    for name in ("capabilities", "deselect", "errors"):
        values[name] = tuple(values[name])
    values["allow_never_executed"] = tuple((name, reason) for name, reason in values["allow_never_executed"])
    values["metric_bounds"] = tuple(MetricBound.from_spec(entry) for entry in values["metric_bounds"])
    if values["nodes"] is not None:
        values["nodes"] = tuple(values["nodes"])
    return Unit(**values)
