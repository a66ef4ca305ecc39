"""What a pytest process left behind: the events of `miles_ci.run.process.event_writer` and pytest's own JUnit XML, read and compared.

Independent witnesses on purpose: exit code, JUnit counts and events must agree. Where they do not, a file keeps its
result only if its own two records agree and other files explain the difference; otherwise it is an error.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miles_ci.run.judge.retry import FailedTest
from miles_ci.run.judge.signature import Frame, signature
from miles_ci.valid_text import valid_text

MESSAGE_LIMIT = 2_000
CRASH = "crash"
_PHASES = ("setup", "call", "teardown")
_NEVER_RUN = re.compile(r"(?:reason: )?\[NOTRUN\]\s*")


@dataclass(frozen=True)
class Failure:
    """One failing item (or a file that could not be collected) in plain form."""

    node: str
    kind: str
    message: str
    frames: tuple[Frame, ...] = ()
    exceptions: tuple[str, ...] = ()
    output: str = ""
    asserted_in_test: bool = False

    @property
    def signature(self) -> str:
        return signature(self.kind, self.message, self.frames)

    def as_failed_test(self) -> FailedTest:
        return FailedTest(self.node, self.exceptions or (self.message,), self.output, self.asserted_in_test)


@dataclass
class Item:
    """One collected node: `outcome` passed, failed, error, skipped or xfailed; None while it has not finished.
    `subtests`: how many of its subtests ended how. A failed one fails the item, as in pytest; the others say nothing
    about it."""

    node: str
    started: bool = False
    outcome: str | None = None
    seconds: float = 0.0
    reason: str = ""
    failures: list[Failure] = field(default_factory=list)
    subtests: Counter[str] = field(default_factory=Counter)


@dataclass
class FileEvidence:
    """Everything known about one test file in one pytest process. `left_out`: item that was made and will not run -> by
    whom."""

    items: dict[str, Item] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    collection_failures: list[Failure] = field(default_factory=list)
    skipped_whole: str | None = None

    def counts(self) -> dict[str, int]:
        counts = dict.fromkeys(("passed", "failed", "error", "skipped", "xfailed", "unfinished"), 0)
        for item in self.items.values():
            counts[item.outcome or "unfinished"] += 1
        counts["error"] += len(self.collection_failures)
        if self.skipped_whole is not None:
            counts["skipped"] += 1
        return counts

    def failures(self) -> list[Failure]:
        return [*self.collection_failures, *(each for item in self.items.values() for each in item.failures)]

    def seconds(self) -> float:
        return sum(item.seconds for item in self.items.values())


@dataclass
class Observed:
    """All events of one pytest process, by file. `importing`: worker (`main` without xdist) -> the file it was
    importing when the events end. `dead_workers`: xdist worker -> what is known about its death."""

    files: dict[str, FileEvidence] = field(default_factory=dict)
    devices: Mapping[str, int] | None = None
    ended: Mapping[str, int] | None = None
    importing: dict[str, str] = field(default_factory=dict)
    dead_workers: dict[str, str] = field(default_factory=dict)

    def file(self, node: str) -> FileEvidence:
        return self.files.setdefault(node.partition("::")[0], FileEvidence())


@dataclass(frozen=True)
class JUnitCounts:
    """`bad`: number of failing cases by JUnit class name (`tests.fast.test_x.TestA`)."""

    tests: int
    failures: int
    errors: int
    skipped: int
    bad: Mapping[str, int] = field(default_factory=dict)

    def bad_by_file(self, paths: Iterable[str]) -> dict[str, int]:
        """Failing cases of each file; a class name belongs to the longest path that is a prefix of it."""
        dotted = {path.removesuffix(".py").replace("/", "."): path for path in paths}
        found = dict.fromkeys(dotted.values(), 0)
        for name, count in self.bad.items():
            owners = [prefix for prefix in dotted if name == prefix or name.startswith(f"{prefix}.")]
            if owners:
                found[dotted[max(owners, key=len)]] += count
        return found


class EventReader:
    """Reads the plugin's file in pieces, as it grows. A last line without its end is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._observed = Observed()

    def read(self) -> Observed:
        """Everything up to now; the same object each time."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self._observed
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            _apply(self._observed, valid_text(event))
        return self._observed


def read_events(path: Path) -> Observed:
    """Read the plugin's file. A last line cut short (the process was killed while writing) is left out."""
    return EventReader(path).read()


def _apply(observed: Observed, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "collected":
        for node in event["nodes"]:
            observed.file(node).items.setdefault(node, Item(node))
    elif kind == "left-out":
        for node, who in event["nodes"].items():
            observed.file(node).left_out[node] = who
    elif kind == "collect":
        evidence = observed.file(event["node"])
        if event["outcome"] == "failed":
            failure = _failure(event["node"], event.get("failure"), event["text"], "")
            if all(known.message != failure.message for known in evidence.collection_failures):
                evidence.collection_failures.append(failure)
        else:
            evidence.skipped_whole = event["text"]
    elif kind == "start":
        observed.file(event["node"]).items.setdefault(event["node"], Item(event["node"])).started = True
    elif kind == "phase":
        _apply_phase(observed.file(event["node"]), event)
    elif kind == "importing":
        if event["node"]:
            observed.importing[event["worker"]] = event["node"]
        else:
            observed.importing.pop(event["worker"], None)
    elif kind == "worker-died":
        observed.dead_workers[event["worker"]] = event["text"]
    elif kind == "devices":
        observed.devices = {"expected": event["expected"], "seen": event["seen"]}
    elif kind == "end":
        observed.ended = event


def _apply_phase(evidence: FileEvidence, event: dict[str, Any]) -> None:
    item = evidence.items.setdefault(event["node"], Item(event["node"]))
    when, outcome = event["when"], event["outcome"]
    if "subtest" in event:
        _apply_subtest(item, event)
        return
    # xdist names the first unfinished test of a dead worker; only a start of its own shows that it was running.
    item.started = item.started or when in _PHASES
    item.seconds += event["seconds"]
    if outcome == "failed":
        item.outcome = "failed" if when == "call" and item.outcome != "error" else "error"
        failure = _failure(event["node"], event.get("failure"), "", event.get("output", ""))
        # pytest's own "contains 1 failed subtest" adds nothing to the failures it counts.
        if not (failure.kind == CRASH and item.subtests["failed"]):
            item.failures.append(failure)
    elif outcome == "skipped" and item.outcome is None:
        item.outcome = "xfailed" if "xfail" in event else "skipped"
        item.reason = event.get("xfail") or event.get("reason", "")
        never = _NEVER_RUN.match(item.reason) if item.outcome == "xfailed" else None
        if never:
            # Nothing was executed, so nothing failed as expected either.
            item.outcome, item.reason = "skipped", f"xfail(run=False) {item.reason[never.end() :]}".strip()
    elif when == "call" and item.outcome is None:
        item.outcome = "passed"
    if when == "call" and item.subtests["failed"] and item.outcome != "error":
        item.outcome = "failed"


def _apply_subtest(item: Item, event: dict[str, Any]) -> None:
    """Its time is part of the item's own, and only its failure part of the item's outcome."""
    outcome = "xfailed" if "xfail" in event and event["outcome"] == "skipped" else event["outcome"]
    item.subtests[outcome] += 1
    if outcome == "failed":
        failure = _failure(event["node"], event.get("failure"), "", event.get("output", ""))
        item.failures.append(replace(failure, message=f"subtest {event['subtest']}: {failure.message}"[:MESSAGE_LIMIT]))


def _failure(node: str, details: Mapping[str, Any] | None, text: str, output: str) -> Failure:
    if details is None:
        return Failure(node, "collection", text[:MESSAGE_LIMIT], output=output)
    exceptions = tuple(details["exceptions"])
    first = exceptions[0] if exceptions else text
    message = first.removeprefix(f"{details['type']}: ")
    return Failure(
        node=node,
        kind=details["type"],
        message=message[:MESSAGE_LIMIT],
        frames=tuple(Frame(file, function, line) for file, function, line in details["frames"]),
        exceptions=exceptions,
        output=output,
        asserted_in_test=details["asserted_in_test"],
    )


def read_junit(path: Path) -> JUnitCounts | None:
    """Counts of pytest's JUnit file, counted from its cases; None when it is absent or damaged."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    cases = list(root.iter("testcase"))
    failing = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return JUnitCounts(
        tests=len(cases),
        failures=sum(case.find("failure") is not None for case in cases),
        errors=sum(case.find("error") is not None for case in cases),
        skipped=sum(case.find("skipped") is not None for case in cases),
        bad=Counter(case.get("classname", "") for case in failing),
    )


def disagreement(exit_code: int, junit: JUnitCounts | None, observed: Observed) -> str | None:
    """Why exit code, JUnit counts and events cannot all be true; None when they agree."""
    if junit is None:
        return f"pytest ended with exit code {exit_code} and left no readable JUnit file"
    bad = junit.failures + junit.errors
    if exit_code == 0 and bad:
        return f"exit code 0, but JUnit counts {junit.failures} failure(s) and {junit.errors} error(s)"
    if exit_code == 0 and junit.tests == 0:
        return "exit code 0, but JUnit counts no test"
    if exit_code == 1 and not bad:
        return "exit code 1, but JUnit counts no failure"
    if exit_code == 5 and junit.tests - junit.skipped > 0:
        return f"exit code 5 (nothing collected), but JUnit counts {junit.tests} test(s)"
    seen_bad = sum(len(file.failures()) > 0 for file in observed.files.values())
    if exit_code in (0, 1) and bool(seen_bad) != bool(bad):
        return f"JUnit counts {bad} failing test(s), the runner's own record {seen_bad} failing file(s)"
    return None


def disagreement_about(path: str, exit_code: int, junit: JUnitCounts | None, observed: Observed) -> str | None:
    """Why the result of this one file cannot be believed; None when it can.

    A process shared by many files may end with the wrong exit code (a signal swallowed at the wrong moment, a plugin
    that resets it). Then the failing tests are failures, and files in which no record shows one keep their results.
    """
    whole = disagreement(exit_code, junit, observed)
    if whole is None or junit is None or exit_code not in (0, 1) or observed.ended is None:
        return whole
    by_file = junit.bad_by_file(observed.files)
    events = {name for name, file in observed.files.items() if file.failures()}
    attributed = sum(by_file.values()) == junit.failures + junit.errors
    if not attributed or not (events or any(by_file.values())):
        return whole
    if by_file.get(path, 0) and path not in events:
        return f"JUnit counts {by_file[path]} failing test(s) of this file, the runner's own record none"
    return None
