"""What kind of failure is this, and may the test run again? One table decides (`retry` in registry.yaml).

Rows are tried in their order; the first match wins. Patterns are regular expressions bounded by non-word
characters, so that `oom` is not found in "room". Text is searched without ANSI colours, and only inside the
failing tests' own exceptions, for strong rows also in what they printed; the last 200 lines of the log stand in where
no test could report its failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_ci.errors import UsageError
from miles_ci.run.judge.signature import strip_ansi

TAIL_LINES = 200
KINDS = ("infra", "test", "timeout")
PLACES = ("exception", "log_tail", "exit", "signal")
ACTIONS = ("retry", "retry_other_host", "stop_host", "none")
MAX_RETRIED = 3
MAX_RETRIED_SHARE = 0.20


@dataclass(frozen=True)
class RetryRow:
    """One row of the table. `strong`: also believed when the failing test raised an assertion of its own."""

    name: str
    kind: str
    where: tuple[str, ...]
    pattern: str
    action: str
    max_attempts: int
    strong: bool = False

    def __post_init__(self) -> None:
        for value, known, label in (
            (self.kind, KINDS, "kind"),
            *((place, PLACES, "where") for place in self.where),
            (self.action, ACTIONS, "action"),
        ):
            if value not in known:
                raise UsageError(f"retry.{self.name}.{label}: {value!r} is not one of {', '.join(known)}")
        if self.max_attempts < 1:
            raise UsageError(f"retry.{self.name}.max_attempts: {self.max_attempts}, must be at least 1")
        try:
            self.regex()
        except re.error as error:
            raise UsageError(f"retry.{self.name}.pattern: not a regular expression: {error}") from error

    def regex(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![A-Za-z0-9_])(?:{self.pattern})(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class FailedTest:
    """One failing test item. `exceptions`: `Type: message` of the exception and its causes.
    `output`: what it printed and logged. `asserted_in_test`: an AssertionError raised in the test file itself."""

    node: str
    exceptions: Sequence[str]
    output: str = ""
    asserted_in_test: bool = False


@dataclass(frozen=True)
class Evidence:
    """All that is known about one failed attempt. `exit_code` is 128 + N for a death by signal N."""

    failed: Sequence[FailedTest] = ()
    log_tail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class Classification:
    """`name` is the row's, or `test` / `timeout` when none matched; `matched` is the text that decided."""

    name: str
    kind: str
    action: str
    max_attempts: int
    matched: str = ""

    def allows(self, attempt: int) -> bool:
        """May attempt `attempt` (from 1) be followed by another one on this host?"""
        return self.action == "retry" and attempt < self.max_attempts


PLAIN_TEST = Classification("test", "test", "none", 1)
PLAIN_TIMEOUT = Classification("timeout", "timeout", "none", 1)


def rows_from(table: Mapping[str, Any]) -> tuple[RetryRow, ...]:
    """The rows of the registry's `retry` section (class name -> `miles_ci.registry.RetryRule`), in file order."""
    return tuple(
        RetryRow(
            name=name,
            kind=rule.kind,
            where=tuple(rule.where),
            pattern=rule.pattern,
            action=rule.action,
            max_attempts=rule.max_attempts,
            strong=rule.strong,
        )
        for name, rule in table.items()
    )


def classify(evidence: Evidence, rows: Iterable[RetryRow]) -> Classification:
    """The class of one failed attempt. A failing assertion of the test is `test` unless a strong row matches in
    that same test; several failing tests are infra only when each of them is."""
    table = tuple(rows)
    by_process = _by_process(evidence, table)
    if by_process is not None:
        return by_process
    if evidence.failed:
        found = [_of_test(test, table) for test in evidence.failed]
        stopping = next((each for each in found if each.action == "stop_host"), None)
        if stopping is not None:
            return stopping
        return next((each for each in found if each.kind == "test"), found[0])
    tail = last_lines(strip_ansi(evidence.log_tail))
    for row in table:
        if "log_tail" in row.where or "exception" in row.where:
            match = row.regex().search(tail)
            if match:
                return _as_row(row, match.group())
    if evidence.timed_out:
        return next((_as_row(row, "time limit") for row in table if row.kind == "timeout"), PLAIN_TIMEOUT)
    return PLAIN_TEST


def may_retry(failures: int, shard_size: int) -> bool:
    """With more failures than this the machine or the change is at fault, not chance."""
    return failures <= max(MAX_RETRIED, MAX_RETRIED_SHARE * shard_size)


def last_lines(text: str, count: int = TAIL_LINES) -> str:
    return "\n".join(text.splitlines()[-count:])


def _by_process(evidence: Evidence, table: Sequence[RetryRow]) -> Classification | None:
    """Rows about how the process ended; our own time limit ends processes too and is no evidence."""
    if evidence.timed_out:
        return None
    for row in table:
        for place, number in (("exit", evidence.exit_code), ("signal", evidence.signal)):
            if place in row.where and number is not None and row.regex().fullmatch(str(number)):
                return _as_row(row, f"{place} {number}")
    return None


def _of_test(test: FailedTest, table: Sequence[RetryRow]) -> Classification:
    exceptions = strip_ansi("\n".join(test.exceptions))
    # What a test merely printed does not explain its exception, except where a row is strong.
    everything = exceptions + "\n" + strip_ansi(test.output)
    for row in table:
        if test.asserted_in_test and not row.strong:
            continue
        if "log_tail" in row.where and row.strong:
            match = row.regex().search(everything)
        elif "log_tail" in row.where:
            match = row.regex().search(exceptions)
        else:
            match = row.regex().search(exceptions) if "exception" in row.where else None
        if match:
            return _as_row(row, match.group())
    return PLAIN_TEST


def _as_row(row: RetryRow, matched: str) -> Classification:
    return Classification(row.name, row.kind, row.action, row.max_attempts, matched)
