"""Errors, diagnostics with a place, nearest names and exit codes of the harness.

`Diagnostic` is one finding in one file; `ConfigErrors` carries all findings of one reading. Every other
error a user can cause derives from `CiError`; the command line prints its text and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the process tells its caller. Several at once: see `combine_exit_codes`."""

    OK = 0
    TEST_FAILURE = 1
    CONFIG = 2
    INFRA = 3
    ZERO_TESTS = 4
    NEVER_EXECUTED = 5
    METRIC_BOUND = 6
    DRIFT = 7
    INTERRUPTED = 130


# Strongest first. Drift comes from `generate --check` and lint alone, which run no tests.
_PRECEDENCE = (130, 2, 5, 1, 4, 6, 3, 7)


def combine_exit_codes(codes: Iterable[int]) -> int:
    """The one exit code of a run in which several things happened; 0 when nothing did."""
    present = set(codes)
    for code in _PRECEDENCE:
        if code in present:
            return code
    unknown = present - {0}
    return min(unknown) if unknown else 0


class CiError(Exception):
    """Root of the harness' errors: the text names the place, what is wrong and what to do instead."""

    exit_code: int = ExitCode.TEST_FAILURE


class UsageError(CiError):
    """The command line, an environment variable or an input file is wrong."""

    exit_code = ExitCode.CONFIG


class PlanMismatch(CiError):
    """A shard was handed another plan than the one it must run."""

    exit_code = ExitCode.NEVER_EXECUTED


@dataclass(frozen=True, order=True)
class Diagnostic:
    """One finding. `line` and `column` count from 1; `path` is relative to the repository root, with `/`."""

    path: str
    line: int
    column: int
    code: str
    message: str
    severity: str = "error"

    def text(self) -> str:
        """`registry.yaml:41:7: error[unknown-hardware] pools.a.hardware: 'h20' is not known; …`"""
        return f"{self.path}:{self.line}:{self.column}: {self.severity}[{self.code}] {self.message}"

    def github(self) -> str:
        """A GitHub Actions annotation command."""
        message = self.message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        path = self.path.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
        return f"::{self.severity} file={path},line={self.line},col={self.column},title={self.code}::{message}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class ConfigErrors(CiError):
    """All findings of one reading, sorted by place. `str()` is one line for each."""

    exit_code = ExitCode.CONFIG

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(sorted(set(diagnostics)))
        super().__init__("\n".join(diagnostic.text() for diagnostic in self.diagnostics))


def edit_distance(left: str, right: str, limit: int) -> int:
    """Insertions, deletions, replacements and swaps of neighbours; `limit + 1` once it must exceed `limit`."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    before: list[int] = []
    previous = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        current = [i]
        for j, b in enumerate(right, 1):
            best = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            current.append(best)
        if min(current) > limit and min(previous) > limit:
            return limit + 1
        before, previous = previous, current
    return previous[-1]


def nearest(name: str, known: Sequence[str], *, limit: int = 3) -> str | None:
    """The known name with the smallest edit distance <= `limit`; ties go to the alphabetically first."""
    best: tuple[int, str] | None = None
    for candidate in sorted(known):
        distance = edit_distance(name, candidate, limit)
        # A distance as large as the name itself is no resemblance.
        if distance <= limit and distance < max(len(name), 1) and (best is None or distance < best[0]):
            best = (distance, candidate)
    return best[1] if best else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'h200'?`, else all valid names when there are at most 12, else nothing."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"; did you mean '{near}'?"
    if names and len(names) <= 12:
        return "; valid: " + ", ".join(names)
    return ""
