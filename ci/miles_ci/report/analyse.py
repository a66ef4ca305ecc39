"""What failed, deterministically: every failing test by name, grouped by signature, with what is known about it.

The set of tests that the report names equals the set of failing tests, else the report is an error: nothing is
dropped, nothing is invented. No model is involved here; see `miles_ci.report.analyst` for the optional part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from miles_ci.errors import CiError
from miles_ci.report.untrusted import SeenShard, SeenTest
from miles_ci.run.judge.signature import mask
from miles_ci.run.results import DIED

SLOWEST = 5


class AnalysisError(CiError):
    """The report does not name exactly the failing tests."""


@dataclass(frozen=True)
class FailedTest:
    """One failing test. `node` is the path itself when the whole file failed."""

    suite: str
    shard: str
    path: str
    node: str
    outcome: str
    message: str
    signature: str
    category: str

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.suite, self.shard, self.node)


@dataclass(frozen=True)
class Group:
    """Failures with one signature, most frequent first in the report."""

    signature: str
    category: str
    message: str
    tests: tuple[FailedTest, ...]


@dataclass(frozen=True)
class SlowTest:
    suite: str
    path: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """Everything a card may show. `skipped` suite -> reason; `jobs` suite -> job result."""

    counts: Mapping[str, int]
    groups: tuple[Group, ...]
    never_executed: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    leaked: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    slowest: tuple[SlowTest, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[FailedTest, ...]:
        return tuple(test for group in self.groups for test in group.tests)

    @property
    def ok(self) -> bool:
        return not (self.groups or self.never_executed or self.faults)


def category_of(test: SeenTest) -> str:
    """test_failure, infra, timeout, build or unknown."""
    if test.outcome == "timeout" or test.cause_kind == "timeout":
        return "timeout"
    if test.outcome in ("infra", "not_run", "cancelled") or test.cause_kind == "infra":
        return "infra"
    if test.outcome == "declaration_error":
        return "build"
    # What passed and blocks all the same has failed a metric bound.
    known = ("failed", "error", "no_tests", "all_skipped", "passed", "flaky")
    return "test_failure" if test.outcome in known else "unknown"


def failed_tests(shard: SeenShard) -> list[FailedTest]:
    """Every failing test of a shard; a unit that failed as a whole is named by its path."""
    found = []
    for test in shard.tests:
        if not test.blocks:
            continue
        category = category_of(test)
        if not test.failures:
            message = test.message or test.outcome
            # Without a traceback the outcome and its cause are the signature.
            signature = f"{test.outcome}:{test.cause}" if test.cause else f"{test.outcome}:{mask(message)[:60]}"
            found.append(
                FailedTest(shard.suite, shard.shard, test.path, test.path, test.outcome, message, signature, category)
            )
        for failure in test.failures:
            found.append(
                FailedTest(
                    shard.suite,
                    shard.shard,
                    test.path,
                    failure.node,
                    test.outcome,
                    failure.message,
                    failure.signature,
                    category,
                )
            )
    return found


def analyse(
    shards: Iterable[SeenShard],
    *,
    never_executed: Sequence[str] = (),
    faults: Sequence[str] = (),
    skipped: Mapping[str, str] | None = None,
) -> Report:
    """The report of a run. Raises `AnalysisError` if it would not name exactly the failing tests."""
    seen = list(shards)
    died = [f"{shard.suite} shard {shard.shard}: {DIED}" for shard in seen if shard.unfinished]
    failed = [test for shard in seen for test in failed_tests(shard)]
    grouped: dict[str, list[FailedTest]] = {}
    for test in failed:
        grouped.setdefault(test.signature or test.node, []).append(test)
    ordered = sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = tuple(Group(name, tests[0].category, tests[0].message, tuple(tests)) for name, tests in ordered)
    counts: dict[str, int] = {}
    leaked, flaky, unstable, slow = [], [], [], []
    for shard in seen:
        for entry in shard.tests:
            counts[entry.outcome] = counts.get(entry.outcome, 0) + 1
            name = f"{shard.suite}: {entry.path}"
            if entry.leaked:
                leaked.append(f"{name} ({entry.leaked} processes)")
            if entry.outcome == "flaky":
                flaky.append(name)
            if entry.outcome == "unstable_failed":
                unstable.append(name)
            slow.append(SlowTest(shard.suite, entry.path, entry.wall_s))
    slow.sort(key=lambda item: (-item.seconds, item.suite, item.path))
    report = Report(
        counts,
        groups,
        tuple(never_executed),
        tuple(dict.fromkeys([*faults, *died])),
        tuple(leaked),
        tuple(flaky),
        tuple(unstable),
        tuple(slow[:SLOWEST]),
        dict(skipped or {}),
    )
    _verify(report, seen)
    return report


def _verify(report: Report, shards: list[SeenShard]) -> None:
    named = sorted(test.key for test in report.failed)
    failing = sorted(
        (shard.suite, shard.shard, node)
        for shard in shards
        for test in shard.tests
        if test.blocks
        for node in ([failure.node for failure in test.failures] or [test.path])
    )
    if named != failing:
        missing, invented = set(failing) - set(named), set(named) - set(failing)
        raise AnalysisError(
            f"the report does not name the failing tests: missing {sorted(missing)}, invented {sorted(invented)}"
        )
