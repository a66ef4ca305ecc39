"""The other commands, help and its pause, and that their effect is verified."""

from __future__ import annotations

import time
from typing import Any

import pytest

from miles_ci.bot.marker import parse_marker
from tests.fast.ci.bot.conftest import HEAD, Job, comment_event
from tests.fast.ci.bot.helpers.github_server import APP_TOKEN, BOT_ID, Fault, GitHub, iso

NUMBER = 8


@pytest.fixture
def pull(hub: GitHub) -> GitHub:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="paul", sha=HEAD)
    return hub


def say(job: Job, hub: GitHub, body: str, login: str = "maria") -> list[str]:
    """Post a comment, run the gateway, return our replies to it."""
    before = {comment["id"] for comment in hub.comments_of(NUMBER)}
    assert job("gateway", event=comment_event(hub, NUMBER, body, login))[0] == 0
    new = [
        comment
        for comment in hub.comments_of(NUMBER)
        if comment["id"] not in before and comment["user"]["id"] == BOT_ID
    ]
    return [comment["body"] for comment in new]


def test_a_label_command_uses_the_app_token_so_that_it_starts_workflows(pull: GitHub, job: Job) -> None:
    assert say(job, pull, "/run-ci-kernels\n/bypass-fastfail") == []
    assert pull.labels[NUMBER] == ["run-ci-kernels", "bypass-fastfail"]
    assert {seen.token for seen in pull.seen if seen.path.endswith("/labels")} == {APP_TOKEN}


def test_clear_labels_removes_ours_and_no_others(pull: GitHub, job: Job) -> None:
    pull.labels[NUMBER] = ["bug", "run-ci-kernels", "run-ci-all", "nightly", "bypass-fastfail", "good first issue"]
    say(job, pull, "/clear-labels")
    assert pull.labels[NUMBER] == ["bug", "good first issue"]


@pytest.mark.parametrize(
    "command",
    [
        "/run-ci-kernels",
        "/cancel",
        "/lint",
        "/clear-labels",
        "/rerun-failed",
        "/rerun-test tests/fast/sample/test_good.py",
    ],
)
def test_without_write_access_a_command_is_refused_with_who_may(pull: GitHub, job: Job, command: str) -> None:
    replies = say(job, pull, command, "stranger")
    assert len(replies) == 1
    assert "needs write access" in replies[0]
    assert pull.dispatched == []
    assert pull.labels[NUMBER] == []


def test_help_and_near_misses_are_answered_once_in_ten_minutes(pull: GitHub, job: Job) -> None:
    assert "| `/rerun-test FILE[::NODE] [suite=ID]` |" in say(job, pull, "/help", "stranger")[0]
    assert say(job, pull, "/hlep", "stranger") == []
    for comment in pull.comments_of(NUMBER):
        comment["created_at"] = iso(time.time() - 700)
    assert "did you mean `/help`?" in say(job, pull, "/hlep", "stranger")[0]


def test_an_unrelated_slash_word_is_met_with_silence(pull: GitHub, job: Job) -> None:
    assert say(job, pull, "/approve\n/lgtm") == []


def test_test_question_mark_lists_suites_labels_and_reasons(pull: GitHub, job: Job) -> None:
    text = say(job, pull, "/test ?", "stranger")[0]
    assert "| `stage-a-cpu` | cpu x cpu | 3 |" in text
    assert "| `stage-b-1-gpu-h200` | h200 x 1 | 0 |" in text
    assert "`run-ci-kernels`" in text
    pull.labels[NUMBER] = ["run-ci-kernels"]
    for comment in pull.comments_of(NUMBER):
        comment["created_at"] = iso(time.time() - 700)
    assert "| `stage-b-1-gpu-h200` | h200 x 1 | 1 |" in say(job, pull, "/test ?", "stranger")[0]


def failed_run(hub: GitHub, workflow: str = "pr-test.yml", **values: Any) -> dict[str, Any]:
    return hub.run(
        workflow,
        title="x",
        status="completed",
        head_sha=values.pop("sha", HEAD),
        event="pull_request",
        **{"conclusion": "failure", **values},
    )


def test_rerun_failed_takes_the_latest_run_of_each_workflow_for_the_live_head(pull: GitHub, job: Job) -> None:
    old = failed_run(pull)
    new = failed_run(pull, conclusion="timed_out")
    rocm = failed_run(pull, "pr-test-rocm.yml", conclusion="cancelled")
    superseded = failed_run(pull, sha="7" * 40)
    fine = failed_run(pull, "nightly.yml")
    replies = say(job, pull, "/rerun-failed")
    assert "`pr-test.yml`: attempt 2 started" in replies[0]
    assert [pull.runs[run["id"]]["run_attempt"] for run in (old, new, rocm, superseded, fine)] == [1, 2, 2, 1, 1]


def test_rerun_failed_of_one_suite_reruns_its_job_alone(pull: GitHub, job: Job) -> None:
    run = failed_run(pull)
    wanted = pull.job(run["id"], "stage-a-cpu (1/2) / stage-a-cpu", "failure")
    pull.job(run["id"], "stage-b-cpu (1/1) / stage-b-cpu", "failure")
    assert "no failed job of" in say(job, pull, "/rerun-failed stage-c-8-gpu-h100")[0]
    say(job, pull, "/rerun-failed stage-a-cpu")
    assert any(seen.path.endswith(f"/actions/jobs/{wanted['id']}/rerun") for seen in pull.seen)


def test_rerun_failed_says_when_a_run_is_too_old_or_has_too_many_attempts(pull: GitHub, job: Job) -> None:
    failed_run(pull, started=time.time() - 31 * 86_400)
    assert "older than 30 days" in say(job, pull, "/rerun-failed")[0]
    run = failed_run(pull)
    pull.runs[run["id"]]["run_attempt"] = 50
    assert "attempt 50 of 50" in say(job, pull, "/rerun-failed")[0]


def test_rerun_failed_without_a_failed_run_says_so(pull: GitHub, job: Job) -> None:
    failed_run(pull, conclusion="success")
    assert "No failed, timed-out or cancelled run" in say(job, pull, "/rerun-failed")[0]


def test_a_lost_answer_to_rerun_failed_starts_one_attempt(pull: GitHub, job: Job) -> None:
    run = failed_run(pull)
    pull.faults.append(Fault("POST", "rerun-failed-jobs", status=0, when="after"))
    say(job, pull, "/rerun-failed")
    assert pull.runs[run["id"]]["run_attempt"] == 2


def test_cancel_stops_runs_of_this_head(pull: GitHub, job: Job) -> None:
    run = pull.run("pr-test.yml", title="x", head_sha=HEAD, event="pull_request")
    assert "1 runs" in say(job, pull, "/cancel")[0]
    assert pull.runs[run["id"]]["conclusion"] == "cancelled"


def test_lint_starts_an_unprivileged_run_and_its_report_tells_how_to_apply(pull: GitHub, job: Job) -> None:
    say(job, pull, "/lint")
    workflow, inputs = pull.dispatched[-1]
    assert workflow == "lint-patch.yml"
    env = {name.upper(): value for name, value in inputs.items()} | {
        "GITHUB_RUN_ID": "77",
        "RESULT": "success",
        "SIZE": "120",
    }
    for _ in range(2):
        assert job("lint-report", **env)[0] == 0
    texts = [
        comment["body"]
        for comment in pull.comments_of(NUMBER)
        if (parse_marker(comment["body"]) or parse_marker("")) is not None
    ]
    assert len(texts) == 1
    assert "git apply lint.patch" in texts[0]


def test_a_dispatch_that_never_becomes_a_run_is_said(pull: GitHub, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_ci.bot.runs.FIND_LIMIT_S", 0.0)
    pull.lose_dispatch = True
    assert "could not be started" in say(job, pull, "/rerun-test tests/fast/sample/test_good.py")[0]


def test_a_closed_pull_request_runs_nothing(pull: GitHub, job: Job) -> None:
    pull.pulls[NUMBER]["state"] = "closed"
    assert "closed" in say(job, pull, "/rerun-test tests/fast/sample/test_good.py")[0]
    assert pull.dispatched == []
