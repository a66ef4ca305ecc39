"""The data of a card and the grouping of its rows. Grouping comes before any limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles_ci.report.analyse import Report
from miles_ci.report.analyst import UNAVAILABLE, Analysis, Unavailable

MAX_GROUPS = 15


@dataclass(frozen=True)
class JobRow:
    """One job: its own link is always kept. `analyses` name its failing tests with their reasons."""

    name: str
    url: str
    result: str
    analyses: tuple[Analysis, ...] = ()


@dataclass(frozen=True)
class RowGroup:
    """Jobs that failed in the same way, shown once."""

    jobs: tuple[JobRow, ...]
    analyses: tuple[Analysis, ...]


@dataclass(frozen=True)
class Card:
    """`cadence` regular, nightly, weekly or release; `when` is a UTC date as text; `url` the run."""

    title: str
    cadence: str
    when: str
    url: str
    result: str
    report: Report
    jobs: tuple[JobRow, ...] = ()
    commit: str = ""
    notes: tuple[str, ...] = ()
    groups: tuple[RowGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "groups",
            group_rows([job for job in self.jobs if job.result != "success" and job.result != "skipped"]),
        )

    @property
    def shown(self) -> tuple[RowGroup, ...]:
        return self.groups[:MAX_GROUPS]

    @property
    def more(self) -> str:
        """`+ N jobs in M groups`, empty when everything is shown."""
        rest = self.groups[MAX_GROUPS:]
        return f"+ {sum(len(group.jobs) for group in rest)} jobs in {len(rest)} groups" if rest else ""


def _claim(analysis: Analysis) -> tuple[object, ...]:
    """What must agree for two jobs to be one row; the job's own id does not."""
    return (analysis.test_name, analysis.reason, analysis.category, analysis.tags, analysis.related_pr)


def group_rows(jobs: Sequence[JobRow]) -> tuple[RowGroup, ...]:
    """Jobs form a group iff their analyses are equal, not empty, and all available."""
    groups: dict[tuple[object, ...], list[JobRow]] = {}
    for at, job in enumerate(jobs):
        known = job.analyses and not any(item.reason is UNAVAILABLE for item in job.analyses)
        key: tuple[object, ...] = tuple(_claim(item) for item in job.analyses) if known else ("alone", at)
        groups.setdefault(key, []).append(job)
    return tuple(RowGroup(tuple(rows), rows[0].analyses) for rows in groups.values())


def reason_text(reason: str | Unavailable) -> str:
    return "no analysis" if isinstance(reason, Unavailable) else reason


def default_analyses(report: Report, suite: str, shard: str) -> tuple[Analysis, ...]:
    """The deterministic claims about one job: its failing tests with the first line of their message."""
    out = []
    for group in report.groups:
        for test in group.tests:
            if test.suite == suite and test.shard == shard:
                first = test.message.strip().split("\n", 1)[0][:280] or test.outcome
                out.append(Analysis(f"{suite} {shard}", test.node, first, test.category, "high"))
    return tuple(out)


def totals(report: Report) -> str:
    """`412 passed, 3 failed, 1 flaky`, in a fixed order."""
    order = (
        "passed",
        "failed",
        "error",
        "timeout",
        "infra",
        "flaky",
        "unstable_failed",
        "no_tests",
        "all_skipped",
        "declaration_error",
        "cancelled",
        "not_run",
    )
    parts = [f"{report.counts[name]} {name.replace('_', ' ')}" for name in order if report.counts.get(name)]
    parts += [f"{len(report.never_executed)} never executed"] if report.never_executed else []
    return ", ".join(parts) or "nothing ran"


def weekday_title(cadence: str, workflow: str) -> str:
    return {"nightly": "Nightly", "weekly": "Weekly", "release": "Release"}.get(cadence, workflow)


def skipped_lines(skipped: Mapping[str, str]) -> list[str]:
    return [f"{suite}: {reason}" for suite, reason in sorted(skipped.items())]
