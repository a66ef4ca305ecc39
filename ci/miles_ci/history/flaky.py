"""Is a failing test broken or flaky, and when may a report about it be closed? Pure functions over outcomes.

A nightly run repeats each failed test (`miles-ci run --rerun-failed`). A repetition that passes on the same commit
proves the test flaky; so does a retry that passed, or a past in which passes and failures alternate. A report is closed
after 20 passes in a row. Leaves out: talking to GitHub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CLOSE_AFTER = 20
STABLE, FLAKY, BROKEN, RECOVERED = "stable", "flaky", "broken", "recovered"
_BAD = ("failed", "error", "timeout")
# This many changes between pass and failure among the last 20 runs are no single break and repair.
MIN_FLIPS = 3


@dataclass(frozen=True)
class Assessment:
    """`state` stable, flaky, broken or recovered (report may be closed); `why` is one sentence."""

    test: str
    suite: str
    state: str
    why: str
    history: tuple[tuple[str, str], ...] = ()


def assess(
    *, test: str, suite: str, outcome: str, reruns: Sequence[str], history: Sequence[tuple[str, str]]
) -> Assessment:
    """Judge one test from this run's outcome, its repetitions, and (run_id, outcome) of earlier runs, newest first."""
    past = tuple(history[:CLOSE_AFTER])
    passes = sum(each == "passed" for each in reruns)

    def verdict(state: str, why: str) -> Assessment:
        return Assessment(test, suite, state, why, past)

    if outcome == "flaky":
        return verdict(FLAKY, "passed when it was tried again")
    if outcome in _BAD and passes:
        return verdict(FLAKY, f"failed, then passed {passes} of {len(reruns)} repetitions on the same commit")
    if outcome in _BAD:
        told = f"failed all {len(reruns)} repetitions too" if reruns else "failed and was not repeated"
        flips = _flips(past)
        if not reruns and flips >= MIN_FLIPS:
            return verdict(FLAKY, f"changed {flips} times between pass and failure in {len(past)} runs")
        return verdict(BROKEN, told)
    if len(past) >= CLOSE_AFTER and all(each == "passed" for _, each in past):
        return verdict(RECOVERED, f"passed {CLOSE_AFTER} times in a row")
    return verdict(STABLE, "passed")


def _flips(history: Sequence[tuple[str, str]]) -> int:
    marks = [outcome in _BAD for _, outcome in history if outcome in _BAD or outcome == "passed"]
    return sum(a != b for a, b in pairwise(marks))


def issue_title(assessment: Assessment) -> str:
    return f"Flaky test: {assessment.test} ({assessment.suite})"


def issue_body(assessment: Assessment, *, message: str, signature: str, owner: str, run_url: str = "") -> str:
    """A drafted report: what was seen, the history, and what closes it. Text from tests is fenced, never rendered."""
    fence = "`" * max(3, _longest_run(message) + 1)
    lines = [
        f"`{assessment.test}` in suite `{assessment.suite}` is flaky: it {assessment.why}.",
        "",
        f"Owner: {owner or 'not declared'}. Failure signature: `{signature or 'none'}`.",
        *([f"Seen in {run_url}"] if run_url else []),
        "",
        fence,
        message.strip() or "(no message)",
        fence,
        "",
        f"Last {len(assessment.history)} runs, newest first:",
        "",
        "| run | outcome |",
        "|---|---|",
        *(f"| {run} | {outcome} |" for run, outcome in assessment.history),
        "",
        f"This report closes itself after {CLOSE_AFTER} passes in a row. To keep the test from blocking meanwhile, "
        'declare it `unstable={"reason": …, "issue": …, "until": …}`.',
    ]
    return "\n".join(lines)


def _longest_run(text: str) -> int:
    longest = current = 0
    for character in text:
        current = current + 1 if character == "`" else 0
        longest = max(longest, current)
    return longest
