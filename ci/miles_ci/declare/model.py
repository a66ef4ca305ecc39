"""What the AST reader returns: plain frozen records that know their place in the source.

Nothing here knows the fleet; a `Declaration` is what the file says, checked field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_ci.errors import Diagnostic
from miles_ci.metric_bound import MetricBound

IMPLICIT_SUITE = "stage-a-cpu"
IMPLICIT_FOLDER = "fast"

Place = tuple[int, int]
Span = tuple[int, int, int, int]

_NO_PLACES: Mapping[str, Place] = {}


@dataclass(frozen=True, slots=True)
class Exemption:
    """Why a test is switched off or may not block, who follows it, and until when (ISO date)."""

    reason: str
    issue: str
    until: str


@dataclass(frozen=True, slots=True)
class Declaration:
    """One `register_*_ci` call, or the implicit registration of a file in the folder `fast` of a test root.

    `est_time` and `timeout` are seconds. `allow_never_executed`: (item, reason) pairs. `est_span` is the source span (1-based lines, 0-based byte
    columns) of the `est_time` literal, which `tune --source` may rewrite.
    """

    path: str
    backend: str
    suite: str
    line: int = 1
    column: int = 1
    est_time: float | None = None
    hardware: tuple[str, ...] = ()
    num_gpus: int | None = None
    min_memory_gib: float | None = None
    capabilities: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    nightly: bool = False
    disabled: Exemption | None = None
    unstable: Exemption | None = None
    timeout: float | None = None
    split: bool = False
    serial: bool = False
    allow_all_skipped: str | None = None
    allow_never_executed: tuple[tuple[str, str], ...] = ()
    owner: str | None = None
    implicit: bool = False
    est_span: Span | None = None
    places: Mapping[str, Place] = field(default_factory=lambda: _NO_PLACES, hash=False, compare=False)

    def place(self, name: str) -> Place:
        """Where the value of a field stands; the call itself for a field that is not given."""
        return self.places.get(name, (self.line, self.column))


@dataclass(frozen=True, slots=True)
class FileScan:
    """What one file declares. With any error the file counts as faulty and its declarations are void."""

    declarations: tuple[Declaration, ...] = ()
    metric_bounds: tuple[MetricBound, ...] = ()
    errors: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class Scan:
    """Every declaration of a tree.

    `declarations` holds those of sound files, sorted by path and line; `errors` every finding;
    `files` all test files seen. A file with an error is in `faulty`, never in `declarations`. `empty_roots`: test
    roots without any test file.
    """

    root: str
    declarations: tuple[Declaration, ...]
    metric_bounds: tuple[MetricBound, ...]
    errors: tuple[Diagnostic, ...]
    files: tuple[str, ...]
    empty_roots: tuple[str, ...] = ()

    @property
    def faulty(self) -> tuple[str, ...]:
        """Paths that have at least one error, sorted."""
        return tuple(sorted({error.path for error in self.errors}))
