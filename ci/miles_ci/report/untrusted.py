"""results.json of a shard as untrusted data: schema-checked, bounded, reduced to what is shown.

Used for artifacts of pull-request runs, whose writers may be anybody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from miles_ci.report.strict_json import StrictJsonError, loads
from miles_ci.run.results import OUTCOMES, SCHEMA, THEN_PASSED

MAX_TESTS = 20_000
MAX_TEXT = 2_000


class BadArtifact(StrictJsonError):
    """An artifact is not what our runner writes."""


@dataclass(frozen=True)
class SeenFailure:
    node: str
    message: str
    signature: str


@dataclass(frozen=True)
class SeenTest:
    path: str
    outcome: str
    nodes: int
    wall_s: float
    message: str
    failures: tuple[SeenFailure, ...]
    leaked: int
    blocks: bool
    cause: str = ""
    cause_kind: str = ""


@dataclass(frozen=True)
class SeenShard:
    suite: str
    hardware: str
    shard: str
    tests: tuple[SeenTest, ...]
    unfinished: bool = False

    @property
    def observed(self) -> int:
        """Tests really seen: node results of units that ran."""
        return sum(test.nodes for test in self.tests if test.outcome not in ("not_run", "cancelled"))


def _text(value: Any, what: str, limit: int = MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise BadArtifact(f"{what}: expected text, found {type(value).__name__}")
    return value[:limit]


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_TESTS:
        raise BadArtifact(f"{what}: expected a list of at most {MAX_TESTS}")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadArtifact(f"{what}: expected an object, found {type(value).__name__}")
    return value


def read_shard(data: bytes | dict[str, Any], what: str = "results.json") -> SeenShard:
    """Parse one shard's results. `BadArtifact` names the field."""
    top = _object(loads(data, what=what) if isinstance(data, bytes) else data, what)
    if top.get("schema") != SCHEMA:
        raise BadArtifact(f"{what}: schema {top.get('schema')!r}, expected {SCHEMA}")
    run = _object(top.get("run"), f"{what}: run")
    tests = tuple(
        _test(entry, f"{what}: tests[{at}]") for at, entry in enumerate(_list(top.get("tests"), f"{what}: tests"))
    )
    suite, hardware = (
        _text(run.get("suite"), f"{what}: run.suite", 64),
        _text(run.get("hardware"), f"{what}: run.hardware", 64),
    )
    shard = _text(run.get("shard"), f"{what}: run.shard", 16)
    return SeenShard(suite, hardware, shard, tests, unfinished=top.get("status") == "running")


def _test(entry: Any, what: str) -> SeenTest:
    data = _object(entry, what)
    outcome = data.get("outcome")
    if outcome not in OUTCOMES:
        raise BadArtifact(f"{what}: outcome {str(outcome)[:40]!r} is not known")
    attempts = [_object(item, f"{what}: attempts") for item in _list(data.get("attempts"), f"{what}: attempts")]
    wall = sum(
        item["wall_s"] for item in attempts if isinstance(item.get("wall_s"), int | float) and item["wall_s"] >= 0
    )
    last = attempts[-1] if attempts else {}
    path = _text(data.get("path"), f"{what}: path", 300)
    failures = tuple(_failure(item, what) for item in _list(last.get("failures", []), f"{what}: failures"))
    metrics = tuple(_metric(item, path, what) for item in _list(data.get("metrics", []), f"{what}: metrics"))
    blocked = tuple(metric for metric in metrics if metric is not None)
    leaked = sum(len(_list(item.get("leaked", []), f"{what}: leaked")) for item in attempts)
    nodes = _object(data.get("nodes", {}), f"{what}: nodes")
    tolerated = bool(data.get("tolerated"))
    blocks = outcome not in ("passed", "flaky", "unstable_failed") and not tolerated
    # A failed metric bound blocks a test that passed.
    failures = (failures if blocks or not blocked else ()) + blocked
    message = _text(data.get("message", ""), f"{what}: message")
    if "passed" in _list(data.get("reruns", []), f"{what}: reruns"):
        # The repetitions of `--rerun-failed` change no outcome, but whoever reads a text should know.
        message = f"{THEN_PASSED}: {message}"
        failures = tuple(replace(failure, message=f"{THEN_PASSED}: {failure.message}") for failure in failures)
    return SeenTest(
        path=path,
        outcome=str(outcome),
        nodes=len(nodes),
        wall_s=float(wall),
        message=message,
        failures=failures,
        leaked=leaked,
        blocks=blocks or bool(blocked),
        cause=_text(last.get("cause", ""), f"{what}: cause", 200),
        cause_kind=_text(last.get("cause_kind", ""), f"{what}: cause_kind", 20),
    )


def _metric(entry: Any, path: str, what: str) -> SeenFailure | None:
    """A verdict on a metric as a failure of the file, or None when it does not block."""
    data = _object(entry, f"{what}: metric")
    if data.get("verdict") not in ("fail", "error"):
        return None
    metric, message = (
        _text(data.get("metric"), f"{what}: metric", 200),
        _text(data.get("message", ""), f"{what}: metric"),
    )
    return SeenFailure(f"{path} (metric {metric})", f"metric bound: {message}", f"metric:{metric}")


def _failure(entry: Any, what: str) -> SeenFailure:
    data = _object(entry, f"{what}: failure")
    node, message = _text(data.get("node"), f"{what}: node", 500), _text(data.get("message", ""), f"{what}: message")
    kind = _text(data.get("type", ""), f"{what}: type", 200)
    return SeenFailure(
        node, f"{kind}: {message}" if kind else message, _text(data.get("signature", ""), f"{what}: signature", 16)
    )
