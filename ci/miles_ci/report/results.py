"""What the results of one or several shards say, in plain text: the end of `miles-ci run` and `results show`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from miles_ci.errors import UsageError
from miles_ci.run import results
from miles_ci.run.results import RERUN_PREFIX, RESULTS_NAME, Provisional, ShardResults, TestResult

SLOWEST = 5


def find_results(places: Iterable[Path]) -> list[Path]:
    """results.json files, given directly or found below folders; those of repetitions (`rerun-N/`) are left out."""
    paths: list[Path] = []
    for place in places:
        found = sorted(place.rglob(RESULTS_NAME)) if place.is_dir() else [place]
        paths.extend(path for path in found if not path.parent.name.startswith(RERUN_PREFIX))
    return paths


def load_all(places: Iterable[Path]) -> list[ShardResults]:
    """Read them all. `UsageError` when there is none."""
    wanted = list(places)
    paths = find_results(wanted)
    if not paths:
        raise UsageError(f"no {RESULTS_NAME} below {', '.join(map(str, wanted)) or 'nothing'}")
    return [results.read_results(path) for path in paths]


def summary(shards: Sequence[ShardResults], *, slowest: int = SLOWEST) -> str:
    """Counts, everything that blocks or is remarkable, the slowest files, the exit code."""
    tests = [test for shard in shards for test in shard.tests]
    counts = {name: sum(test.outcome == name for test in tests) for name in results.OUTCOMES}
    lines = []
    for test in sorted(tests, key=lambda test: test.unit):
        lines.extend(_lines_of(test))
    for shard in shards:
        lines.extend(f"note: {note}" for note in shard.notes)
        if shard.status == "running":
            lines.append(f"UNFINISHED   {shard.info.suite} shard {shard.info.shard}: {results.DIED}")
            lines.extend(_provisional_line(each) for each in shard.provisional.values())
    by_time = sorted(tests, key=lambda test: (-test.wall_s, test.unit))[:slowest]
    if slowest != SLOWEST:
        lines.extend(f"{test.wall_s:8.1f} s  {test.unit}" for test in by_time)
    elif len(tests) > SLOWEST:
        lines.append("slowest: " + ", ".join(f"{test.unit} {test.wall_s:.1f} s" for test in by_time))
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing ran"
    expected = sum(map(_only_xfailed, tests))
    if expected:
        told += f" ({expected} of the passed only xfailed)"
    nodes = sum(len(test.nodes) for test in tests)
    wall = sum((shard.ended_at or shard.info.started_at) - shard.info.started_at for shard in shards)
    code = results.exit_code_of(shards)
    lines.append(f"{len(tests)} file(s), {nodes} test(s): {told}; {wall:.1f} s, exit code {code}")
    return "\n".join(lines)


def _only_xfailed(test: TestResult) -> bool:
    """A passed file in which nothing passed: what ran failed, as its tests expect."""
    outcomes = set(test.nodes.values())
    return test.outcome == results.PASSED and "xfailed" in outcomes and "passed" not in outcomes


def _after_repetition(test: TestResult) -> str:
    """What `--rerun-failed` found out; the outcome stays as it was."""
    if results.PASSED in test.reruns:
        return f"; {results.THEN_PASSED}: repetition {test.reruns.index(results.PASSED) + 1} passed"
    return f"; failed in {len(test.reruns)} repetition(s) too" if test.reruns else ""


def _provisional_line(seen: Provisional) -> str:
    told = ", ".join(f"{count} {name}" for name, count in seen.counts.items() if count) or "no test"
    first = next((f"; {failure.node}: {failure.type}: {failure.message}" for failure in seen.failures), "")
    return f"PROVISIONAL  {seen.unit}: {told}, not judged{first.splitlines()[0] if first else ''}"


def _lines_of(test: TestResult) -> list[str]:
    lines = []
    if test.outcome != results.PASSED:
        why = f" (tolerated: {test.tolerated})" if test.tolerated else ""
        lines.append(f"{test.outcome.upper():<12} {test.unit}{why}: {test.message}{_after_repetition(test)}")
    elif _only_xfailed(test):
        count = sum(outcome == "xfailed" for outcome in test.nodes.values())
        lines.append(f"{'XFAILED':<12} {test.unit}: {count} test(s) failed as expected, none passed")
    lines.extend(f"NEVER RUN    {node}: {who}" for node, who in test.never_executed.items())
    lines.extend(f"LEFT OUT     {node}: {why}" for node, why in test.allowed.items())
    for attempt in test.attempts:
        lines.extend(f"LEAKED       {test.unit}: {left}" for left in attempt.leaked)
    lines.extend(
        f"METRIC {metric.verdict.upper():<7} {test.unit}: {metric.message}"
        for metric in test.metrics
        if metric.verdict != "pass"
    )
    return lines
