"""Borders of small rules of the bot: which values of a payload, a run, a marker or a pull request count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from miles_ci.bot.access import live_approval
from miles_ci.bot.actions_io import field
from miles_ci.bot.marker import Marker
from miles_ci.bot.prose import prose_lines
from miles_ci.bot.rerun.comment import final_body
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.state import TERMINAL, rank
from miles_ci.bot.rerun.verdict import RerunVerdict
from miles_ci.bot.runs import Run
from miles_ci.bot.starting import MAX_AGE_S, too_old
from miles_ci.bot.status_card import pull_of
from miles_ci.declare import register_cpu_ci
from miles_ci.errors import UsageError

register_cpu_ci(est_time=2, suite="stage-a-cpu")

SHA, OTHER = "a" * 40, "b" * 40


def run(*, created_at: float | None = 0.0, attempt: int = 1, event: str = "pull_request") -> Run:
    return Run(
        id=1, url="", attempt=attempt, title="", status="completed", conclusion="failure", path="", head_sha=SHA,
        created_at=created_at, started_at=None, raw={"event": event},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "taken"),
    [(int, 3, True), (int, True, False), (bool, True, True), (bool, 1, False), (str, "x", True), (str, 1, False)],
)
def test_true_is_no_number_and_a_number_is_not_true(kind: type, value: Any, taken: bool) -> None:
    if taken:
        assert field({"a": {"b": value}}, "a.b", kind) is value
    else:
        with pytest.raises(UsageError, match=rf"'a.b' is {type(value).__name__}, expected {kind.__name__}"):
            field({"a": {"b": value}}, "a.b", kind)


@pytest.mark.parametrize(("age", "old"), [(MAX_AGE_S - 1, False), (MAX_AGE_S, False), (MAX_AGE_S + 1, True)])
def test_a_run_is_too_old_after_thirty_days_and_not_on_the_last_second(age: float, old: bool) -> None:
    client: Any = SimpleNamespace(clock=lambda: 1000.0 + age)
    assert too_old(client, run(created_at=1000.0)) == ("older than 30 days" if old else None)


def test_a_state_that_nobody_knows_stands_below_all_others() -> None:
    known = [rank(Marker("rerun", "r", 1, 1, state)) for state in ("running", *TERMINAL)]
    assert rank(Marker("rerun", "r", 1, 1, "finished?")) < min(known)
    assert rank(Marker("rerun", "r", 1, 2, "finished?")) > max(known)


@pytest.mark.parametrize(
    ("state", "sha", "found"), [("open", SHA, 7), ("closed", SHA, None), ("open", OTHER, None), ("closed", OTHER, None)]
)
def test_a_card_is_for_an_open_pull_request_whose_head_this_is(state: str, sha: str, found: int | None) -> None:
    pulls = [{"state": state, "head": {"sha": sha}, "number": 7}]
    client: Any = SimpleNamespace(pages=lambda path: pulls)
    assert pull_of(client, run()) == found
    assert pull_of(client, run(event="schedule")) is None


@pytest.mark.parametrize(
    ("close", "ends"),
    [("```", True), ("````", True), ("```  ", True), ("``", False), ("~~~", False), ("``` text", False)],
)
def test_a_fence_ends_with_one_of_its_kind_as_long_and_with_nothing_after_it(close: str, ends: bool) -> None:
    seen = [line.text for line in prose_lines(f"before\n```\n/inside\n{close}\n/after")]
    assert seen == (["before", "/after"] if ends else ["before"])


def test_a_final_comment_says_superseded_only_where_it_is_told_so() -> None:
    request = Request(7, SHA, "tests/test_a.py", "", "stage-a", "r1", 1, "someone", {})
    told = RerunVerdict("passed")
    plain = final_body(request, 1, 1, "https://example.org", told, [])
    assert f"at `{SHA[:12]}`" in plain
    assert "superseded" not in plain
    assert f"for superseded `{SHA[:12]}`" in final_body(request, 1, 1, "https://example.org", told, [], superseded=True)


@pytest.mark.parametrize("output", [None, {}, {"text": None}, {"text": "no JSON"}, {"text": "[]"}])
def test_a_check_run_without_an_approval_in_it_approves_nothing(output: Any) -> None:
    check = {
        "id": 1, "app": {"id": 5}, "head_sha": SHA, "status": "completed", "conclusion": "success",
        "external_id": "9", "output": output,
    }  # fmt: skip
    client: Any = SimpleNamespace(pages=lambda *_, **__: [check])
    pull: Any = SimpleNamespace(head_sha=SHA, author_id=1, body="")
    assert live_approval(client, pull, 5) is None
