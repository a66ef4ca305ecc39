"""Flaky or broken, and when a report may be closed."""

from __future__ import annotations

import pytest

from miles_ci.history.flaky import BROKEN, FLAKY, RECOVERED, STABLE, Assessment, assess, issue_body, issue_title


def state(outcome: str, reruns: list[str], *past: str) -> str:
    history = [(f"r{n}", each) for n, each in enumerate(past)]
    return assess(test="tests/x.py", suite="s", outcome=outcome, reruns=reruns, history=history).state


@pytest.mark.parametrize(
    ("outcome", "reruns", "expected"),
    [
        ("failed", ["failed", "passed"], FLAKY),
        ("failed", ["failed", "failed", "failed"], BROKEN),
        ("timeout", ["passed"], FLAKY),
        ("error", [], BROKEN),
        ("flaky", [], FLAKY),
        ("passed", [], STABLE),
        ("infra", [], STABLE),
    ],
)
def test_repetitions_tell_flaky_from_broken(outcome, reruns, expected):
    assert state(outcome, reruns) == expected


def test_past_that_alternates_is_flaky_and_one_break_is_not():
    assert state("failed", [], "failed", "passed", "failed", "passed", "passed") == FLAKY
    assert state("failed", [], "failed", "failed", "failed", "passed", "passed") == BROKEN
    # Repetitions on the same commit are the better witness.
    assert state("failed", ["failed", "failed"], "failed", "passed", "failed", "passed") == BROKEN


def test_twenty_passes_in_a_row_close_a_report_and_nineteen_do_not():
    assert state("passed", [], *["passed"] * 20) == RECOVERED
    assert state("passed", [], *["passed"] * 19) == STABLE
    assert state("passed", [], *["passed"] * 10, "failed", *["passed"] * 9) == STABLE
    assert state("passed", [], *["passed"] * 20, "failed") == RECOVERED


def test_drafted_report_holds_history_and_cannot_be_broken_by_the_message():
    found = Assessment("tests/x.py", "s", FLAKY, "failed once", (("r1", "failed"), ("r2", "passed")))
    body = issue_body(found, message="```\n@everyone <b>", signature="ab", owner="ci", run_url="https://host/1")
    assert issue_title(found) == "Flaky test: tests/x.py (s)"
    assert "| r1 | failed |" in body
    assert "````\n```\n@everyone <b>\n````" in body
    assert "20 passes in a row" in body
