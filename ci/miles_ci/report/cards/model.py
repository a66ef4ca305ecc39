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
    """One root cause, or several of the same jobs, shown once; `analyses` are the distinct claims about it."""

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
        return hidden_text(self.groups[MAX_GROUPS:])


def _claim(analysis: Analysis) -> tuple[object, ...]:
    """What a row says about one test; the job's own id does not count."""
    return (analysis.test_name, analysis.reason, analysis.category, analysis.tags, analysis.related_pr)


def group_rows(jobs: Sequence[JobRow]) -> tuple[RowGroup, ...]:
    """One row for each root cause with every job that has it, the row with the most jobs first.

    A cause is a signature (without one, the whole claim). Causes of exactly the same jobs share a row, so a job's own
    failures stay together; a job that has another job's cause too stands in both rows. Jobs without analyses, or with
    one that is unavailable, stand alone.
    """
    causes: dict[object, tuple[dict[int, None], list[Analysis]]] = {}
    alone: dict[tuple[int, ...], list[Analysis]] = {}
    for at, job in enumerate(jobs):
        if not job.analyses or any(item.reason is UNAVAILABLE for item in job.analyses):
            alone[(at,)] = list(job.analyses)
            continue
        for item in job.analyses:
            members, claims = causes.setdefault(item.signature or _claim(item), ({}, []))
            members[at] = None
            claims.append(item)
    rows: dict[tuple[int, ...], list[Analysis]] = {}
    for members, claims in causes.values():
        rows.setdefault(tuple(members), []).extend(claims)
    ordered = sorted((rows | alone).items(), key=lambda row: (-len(row[0]), row[0]))
    return tuple(
        RowGroup(tuple(jobs[at] for at in members), tuple({_claim(item): item for item in claims}.values()))
        for members, claims in ordered
    )


def hidden_text(groups: Sequence[RowGroup]) -> str:
    """`+ N jobs in M groups` for what is not shown; a job in several of them counts once."""
    jobs = {(job.name, job.url) for group in groups for job in group.jobs}
    return f"+ {len(jobs)} jobs in {len(groups)} groups" if groups else ""


def reason_text(reason: str | Unavailable) -> str:
    return "no analysis" if isinstance(reason, Unavailable) else reason


def default_analyses(report: Report, suite: str, shard: str) -> tuple[Analysis, ...]:
    """The deterministic claims about one job: its failing tests with the first line of their message."""
    out = []
    for group in report.groups:
        for test in group.tests:
            if test.suite == suite and test.shard == shard:
                first = test.message.strip().split("\n", 1)[0][:280] or test.outcome
                out.append(
                    Analysis(f"{suite} {shard}", test.node, first, test.category, "high", signature=group.signature)
                )
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
