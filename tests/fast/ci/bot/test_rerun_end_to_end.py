"""Comment -> permission -> dispatch -> announce -> resolve -> run -> report, against a server that checks every message.

The jobs run as the generated workflow runs them (environment, outputs, conditions by the simulator); the tests
themselves are executed by a real `miles-ci run --file`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_ci.bot.github import Client
from miles_ci.bot.marker import Marker, parse_marker
from miles_ci.bot.rerun.comment import Row, final_body
from miles_ci.bot.rerun.report import collect, report
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.verdict import RerunVerdict
from miles_ci.bot.sweeper import GRACE_S, sweep
from miles_ci.registry import load_fleet
from miles_ci.workflows.generate import render
from miles_ci.workflows.model import Workflow
from miles_ci.workflows.simulate import Event, Outcome, local_resolver, simulate
from tests.fast.ci.bot.conftest import HEAD, ROOT, Clock, Job, comment_event
from tests.fast.ci.bot.helpers.github_server import BOT_ID, Fault, GitHub, iso
from tests.fast.ci.helpers.lean import LEAN_PYTEST

NUMBER = 12
# What `miles-ci run` really did, once for each target; the other tests reuse its results.
_EXECUTED: dict[tuple[str, str], tuple[int, dict[str, bytes]]] = {}


@pytest.fixture(scope="module")
def workflows() -> Mapping[str, Workflow]:
    rendered = render(load_fleet(ROOT / "registry.yaml"))
    return {Path(path).name: Workflow.from_text(text, path) for path, text in rendered.items()}


class Rerun:
    """Drives one dispatched run the way GitHub would."""

    def __init__(
        self, hub: GitHub, job: Job, checkout: Path, workflows: Mapping[str, Workflow], inputs: dict[str, str]
    ) -> None:
        self.hub, self.job, self.checkout, self.workflows, self.inputs = hub, job, checkout, workflows, inputs
        self.run_id = next(i for i, run in hub.runs.items() if f"[{inputs['request_id']}]" in run["display_title"])
        self.attempt = 1
        self.outcomes: dict[str, Outcome | str] = {}
        self.env = {name.upper(): value for name, value in inputs.items()} | {"GITHUB_RUN_ID": str(self.run_id)}
        self.env["TEST_NODE"] = self.env.pop("NODE")

    def states(self) -> dict[str, Any]:
        event = Event("workflow_dispatch", inputs=self.inputs)
        outcomes = {"resolve": "failure"} | self.outcomes  # until it has run
        return simulate(self.workflows["rerun-test.yml"], event, outcomes, resolve=local_resolver(self.workflows))

    def announce(self, **env: str) -> dict[str, str]:
        self.hub.runs[self.run_id]["status"] = "in_progress"
        code, outputs = self.job("announce", **(self.env | env))
        self.outcomes["announce"] = Outcome("success" if code == 0 else "failure", outputs)
        self.hub.job(self.run_id, "announce", "success" if code == 0 else "failure", attempt=self.attempt)
        return outputs

    def resolve(self) -> dict[str, str]:
        assert self.states()["resolve"].ran
        code, outputs = self.job("resolve", "--root", ".", **self.env)
        outputs = {name: value for name, value in outputs.items() if name != "summary"}
        self.outcomes["resolve"] = Outcome("success" if code == 0 else "failure", outputs if code == 0 else {})
        self.hub.job(self.run_id, "resolve", "success" if code == 0 else "failure", attempt=self.attempt)
        return outputs

    def run_leg(self, suite: str) -> int:
        """The reusable workflow's own command, really executed."""
        target = self.inputs["test_file"] + (f"::{self.inputs['node']}" if self.inputs["node"] else "")
        if (suite, target) not in _EXECUTED:
            command = [
                sys.executable,
                "-m",
                "miles_ci",
                "run",
                "--suite",
                suite,
                "--file",
                target,
                "--results",
                "results",
            ]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **LEAN_PYTEST}
            done = subprocess.run(
                command, cwd=self.checkout, env=env, capture_output=True, text=True, timeout=100, check=False
            )
            files = {
                str(path.relative_to(self.checkout)): path.read_bytes()
                for path in (self.checkout / "results").rglob("*.json")
            }
            _EXECUTED[suite, target] = (done.returncode, files)
        code, files = _EXECUTED[suite, target]
        self.hub.artifact(self.run_id, f"results-rerun-{suite}", files)
        self.leg(suite, "success" if code == 0 else "failure")
        return code

    def leg(self, suite: str, result: str, **values: Any) -> None:
        self.outcomes["run-cpu"] = result
        self.hub.job(self.run_id, f"rerun {suite} / {suite}", result, attempt=self.attempt, **values)

    def report(self, **env: str) -> tuple[int, dict[str, str]]:
        states = self.states()
        assert states["report"].ran
        needs = {
            name: {"result": state.result, "outputs": dict(state.outputs)}
            for name, state in states.items()
            if name != "report"
        }
        announced = states["announce"].outputs
        values = {
            "NEEDS": json.dumps(needs), "PLANNED": states["resolve"].outputs.get("planned", ""),
            "COMMENT_ID": announced.get("comment_id", ""), "CHECK_ID": announced.get("check_id", ""),
        }  # fmt: skip
        done = self.job("report", **(self.env | values | env))
        self.hub.runs[self.run_id] |= {"status": "completed", "conclusion": "success"}
        return done

    def comments(self) -> list[tuple[dict[str, Any], Marker]]:
        found = []
        for comment in self.hub.comments_of(NUMBER):
            marker = parse_marker(comment["body"])
            if (
                comment["user"]["id"] == BOT_ID
                and marker
                and marker.kind == "rerun"
                and marker.req == self.inputs["request_id"]
            ):
                found.append((comment, marker))
        return found

    def only(self) -> tuple[dict[str, Any], Marker]:
        found = self.comments()
        assert len(found) == 1, [comment["body"] for comment, _ in found]
        return found[0]


@pytest.fixture
def start(hub: GitHub, job: Job, checkout: Path, workflows: Mapping[str, Workflow]) -> Any:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="paul", sha=HEAD)

    def begin(file: str = "tests/fast/sample/test_good.py", *, login: str = "maria", extra: str = "") -> Rerun:
        before = len(hub.dispatched)
        code, _ = job("gateway", event=comment_event(hub, NUMBER, f"/rerun-test {file}{extra}", login))
        assert code == 0
        assert len(hub.dispatched) == before + 1
        workflow, inputs = hub.dispatched[-1]
        assert workflow == "rerun-test.yml"
        assert inputs["head_sha"] == HEAD
        return Rerun(hub, job, checkout, workflows, inputs)

    return begin


def test_a_passing_file_is_run_for_real_and_reported_in_the_one_comment(start: Any, hub: GitHub) -> None:
    rerun = start()
    announced = rerun.announce()
    comment, marker = rerun.only()
    assert marker.state == "running"
    assert "running" in comment["body"]
    outputs = rerun.resolve()
    assert (outputs["count_cpu"], outputs["count_cuda"], outputs["count_rocm"]) == ("1", "0", "0")
    assert rerun.states()["run-cuda"].result == "skipped"
    assert rerun.run_leg("stage-a-cpu") == 0
    assert rerun.report()[0] == 0
    final, marker = rerun.only()
    assert final["id"] == comment["id"]
    assert marker.state == "passed"
    assert "| `stage-a-cpu` | cpu | success | 5 s | 2 |" in final["body"]
    check = hub.checks[int(announced["check_id"])]
    assert (check["status"], check["conclusion"]) == ("completed", "success")
    assert check["name"] == "rerun / tests/fast/sample/test_good.py (all suites)"
    assert rerun.report()[0] == 0  # repeating it changes nothing
    assert rerun.only()[0]["updated_at"] == final["updated_at"]


def test_a_failing_file_names_its_failing_test(start: Any, hub: GitHub) -> None:
    rerun = start("tests/fast/sample/test_bad.py")
    announced = rerun.announce()
    rerun.resolve()
    assert rerun.run_leg("stage-a-cpu") == 1
    rerun.report()
    comment, marker = rerun.only()
    assert marker.state == "failed"
    assert "- `tests/fast/sample/test_bad.py::test_broken`" in comment["body"]
    assert "test_fine" not in comment["body"]
    assert hub.checks[int(announced["check_id"])]["conclusion"] == "failure"


def test_one_node_is_run_alone(start: Any) -> None:
    rerun = start("tests/fast/sample/test_bad.py", extra="::test_fine")
    rerun.announce()
    rerun.resolve()
    assert rerun.run_leg("stage-a-cpu") == 0
    rerun.report()
    assert rerun.only()[1].state == "passed"
    assert "| 1 | [log]" in rerun.only()[0]["body"]


def test_a_file_without_tests_fails_although_nothing_failed(start: Any) -> None:
    rerun = start("tests/fast/sample/test_empty.py")
    rerun.announce()
    rerun.resolve()
    assert rerun.run_leg("stage-a-cpu") != 0
    rerun.report()
    assert rerun.only()[1].state == "failed"


def test_a_green_job_that_observed_no_test_is_failed(start: Any) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "success")
    rerun.report()
    assert rerun.only()[1].state == "failed"
    assert "(no test was observed)" in rerun.only()[0]["body"]


@pytest.mark.parametrize(
    ("leg", "state", "text"),
    [
        ("cancelled", "cancelled", "**cancelled**"),
        ("skipped", "failed", "nothing ran"),
        ("timed_out", "failed", "**failed**"),
    ],
)
def test_each_end_of_an_execution_has_its_outcome(start: Any, leg: str, state: str, text: str) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", leg)
    rerun.outcomes["run-cpu"] = "failure" if leg == "timed_out" else leg
    rerun.report()
    assert rerun.only()[1].state == state
    assert text in rerun.only()[0]["body"]


def test_an_execution_that_was_not_planned_is_inconsistent(start: Any) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    assert rerun.run_leg("stage-a-cpu") == 0
    rerun.leg("stage-b-cpu", "success")
    rerun.report()
    assert rerun.only()[1].state == "failed"
    assert "inconsistent" in rerun.only()[0]["body"]


def test_a_file_that_is_absent_at_this_commit_never_starts(start: Any) -> None:
    rerun = start("tests/fast/sample/test_gone.py")
    rerun.announce()
    rerun.resolve()
    assert rerun.states()["run-cpu"].result == "skipped"
    rerun.report()
    assert rerun.only()[1].state == "failed"
    assert "never started" in rerun.only()[0]["body"]


def test_a_failed_announcement_does_not_stop_the_run_and_the_report_creates_the_comment(
    start: Any, hub: GitHub
) -> None:
    rerun = start()
    hub.faults.append(Fault("POST", "/issues/12/comments", status=403))
    rerun.announce()
    assert rerun.comments() == []
    rerun.resolve()
    assert rerun.run_leg("stage-a-cpu") == 0
    rerun.report()
    assert rerun.only()[1].state == "passed"


def test_a_deleted_comment_is_replaced_by_one_terminal_comment(start: Any, hub: GitHub) -> None:
    rerun = start()
    rerun.announce()
    del hub.comments[rerun.only()[0]["id"]]
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure")
    rerun.report()
    rerun.report()
    assert rerun.only()[1].state == "failed"


def test_a_lost_comment_id_is_found_again_by_its_marker_on_a_later_page(start: Any, hub: GitHub) -> None:
    hub.page_size = 2
    rerun = start()
    for n in range(5):
        hub.comment(NUMBER, f"chatter {n}", login="paul")
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure")
    rerun.report(COMMENT_ID="", CHECK_ID="")
    assert rerun.only()[1].state == "failed"


@pytest.mark.parametrize(
    "times",
    [
        {"started_at": "not a time"},
        {"completed_at": None},
        {"started_at": "2026-11-30T12:00:00Z", "completed_at": "2026-11-30T11:00:00Z"},
    ],
)
def test_a_missing_malformed_or_negative_duration_is_unknown_and_still_terminal(
    start: Any, hub: GitHub, times: dict[str, Any]
) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure", **times)
    rerun.report()
    hub.problems.clear()  # the malformed time is itself outside the contract
    assert rerun.only()[1].state == "failed"
    assert "duration unknown" in rerun.only()[0]["body"]


def test_an_older_attempt_stays_silent_after_a_newer_one_reported(start: Any) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure")
    rerun.attempt = 2
    rerun.hub.job(rerun.run_id, "resolve", "success", attempt=2)
    rerun.hub.job(rerun.run_id, "rerun stage-a-cpu / stage-a-cpu", "cancelled", attempt=2)
    rerun.report(GITHUB_RUN_ATTEMPT="2")
    newer = rerun.only()[0]["body"]
    assert rerun.only()[1].attempt == 2
    rerun.report(GITHUB_RUN_ATTEMPT="1")
    assert rerun.only()[0]["body"] == newer


def test_a_head_that_moved_is_reported_as_superseded(start: Any, hub: GitHub) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure")
    hub.pulls[NUMBER]["head"]["sha"] = "b2" * 20
    rerun.report()
    assert f"for superseded `{HEAD[:12]}`" in rerun.only()[0]["body"]


def test_two_commands_in_one_second_get_two_runs_and_two_comments(start: Any, hub: GitHub) -> None:
    first, second = start(), start()
    assert first.inputs["request_id"] != second.inputs["request_id"]
    assert first.run_id != second.run_id
    for rerun in (second, first):
        rerun.announce()
        rerun.resolve()
        rerun.leg("stage-a-cpu", "failure" if rerun is first else "cancelled")
        rerun.report()
    assert (first.only()[1].state, second.only()[1].state) == ("failed", "cancelled")


def test_a_killed_finaliser_is_finished_by_the_sweeper_with_the_true_result(start: Any, hub: GitHub, job: Job) -> None:
    rerun = start("tests/fast/sample/test_bad.py")
    announced = rerun.announce()
    rerun.resolve()
    assert rerun.run_leg("stage-a-cpu") == 1
    hub.runs[rerun.run_id] |= {"status": "completed", "conclusion": "cancelled"}
    code, outputs = job("sweep")
    assert code == 0
    comment, marker = rerun.only()
    assert marker.state == "failed"
    assert "test_broken" in comment["body"]
    assert rerun.inputs["request_id"] in outputs["summary"]
    assert hub.checks[int(announced["check_id"])]["conclusion"] == "failure"
    assert "Nothing was left behind" in job("sweep")[1]["summary"]


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_that_is_gone_or_far_beyond_its_limit_becomes_lost(start: Any, hub: GitHub, job: Job, gone: bool) -> None:
    rerun = start()
    rerun.announce()
    if gone:
        del hub.runs[rerun.run_id]
    else:
        old = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 40_000))
        hub.runs[rerun.run_id] |= {"run_started_at": old, "created_at": old}
    assert job("sweep")[0] == 0
    assert rerun.only()[1].state == "lost"


def test_a_run_within_its_limit_is_left_alone(start: Any, job: Job) -> None:
    rerun = start()
    rerun.announce()
    assert "Nothing was left behind" in job("sweep")[1]["summary"]
    assert rerun.only()[1].state == "running"


@pytest.mark.parametrize(
    ("created", "started", "state"),
    [
        (None, 1 + 1 / 60, "lost"), (None, 1 - 1 / 60, "running"), (2, 1 - 1 / 60, "running"), (1 - 1 / 60, 1 + 1 / 60, "lost"),
        (1 + 1 / 60, None, "lost"), (1 - 1 / 60, None, "running"), (None, None, "running"),
    ],
)  # fmt: skip
def test_a_run_is_lost_when_its_limit_and_the_grace_are_over_since_this_attempt_began(
    start: Any, hub: GitHub, client: Client, clock: Clock, created: float | None, started: float | None, state: str
) -> None:
    """`created`, `started`: how long ago, in units of limit and grace; None is a time that GitHub does not give."""
    rerun = start()
    rerun.announce()
    limit = 1800.0
    for name, ago in (("created_at", created), ("run_started_at", started)):
        hub.runs[rerun.run_id][name] = None if ago is None else iso(clock() - ago * (limit + GRACE_S))
    sweep(client, bot_id=BOT_ID, limit_s=limit)
    hub.problems.clear()  # GitHub promises the times
    assert rerun.only()[1].state == state


def test_a_refused_check_run_leaves_the_comment_as_the_report(start: Any, hub: GitHub) -> None:
    rerun = start()
    hub.faults.append(Fault("POST", "/check-runs$", status=422))
    assert rerun.announce()["check_id"] == "0"
    rerun.resolve()
    rerun.leg("stage-a-cpu", "cancelled")
    rerun.report()
    assert rerun.only()[1].state == "cancelled"
    assert hub.checks == {}


def test_a_lost_answer_to_the_dispatch_starts_no_second_run(hub: GitHub, job: Job) -> None:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="paul", sha=HEAD)
    hub.faults.append(Fault("POST", "/dispatches", status=0, when="after"))
    job("gateway", event=comment_event(hub, NUMBER, "/rerun-test tests/fast/sample/test_good.py", "maria"))
    assert len(hub.dispatched) == 1
    assert len(hub.runs) == 1


def test_a_dispatch_without_details_is_found_by_its_request_id(hub: GitHub, job: Job) -> None:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="paul", sha=HEAD)
    hub.dispatch_details = False
    job("gateway", event=comment_event(hub, NUMBER, "/rerun-test tests/fast/sample/test_good.py", "maria"))
    assert len(hub.dispatched) == 1
    assert [c for c in hub.comments_of(NUMBER) if c["user"]["id"] == BOT_ID] == []


def test_gateway_needs_less_than_a_second_from_start_to_dispatch(hub: GitHub, job: Job) -> None:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="paul", sha=HEAD)
    event = comment_event(hub, NUMBER, "/rerun-test tests/fast/sample/test_good.py", "maria")
    start = time.process_time()
    job("gateway", event=event)
    assert hub.dispatched
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("status", [404, 410])
def test_a_comment_that_vanishes_between_read_and_edit_is_replaced(start: Any, hub: GitHub, status: int) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure")
    comment_id = rerun.only()[0]["id"]
    hub.faults.append(Fault("PATCH", f"/issues/comments/{comment_id}", status=status))
    del hub.comments[comment_id]
    rerun.report()
    assert rerun.only()[1].state == "failed"


def test_two_finalisers_at_once_write_the_same_single_terminal_comment(start: Any, hub: GitHub, client: Client) -> None:
    rerun = start()
    rerun.announce()
    rerun.resolve()
    rerun.leg("stage-a-cpu", "failure")
    request = Request.from_environment(rerun.env)
    comment_id = rerun.only()[0]["id"]

    def finish() -> None:
        finding = collect(client, rerun.run_id, 1, "success", {"stage-a-cpu": "cpu"})
        report(
            client,
            request,
            finding,
            run_id=rerun.run_id,
            attempt=1,
            run_url="https://x",
            comment_id=comment_id,
            check_id=0,
            bot_id=BOT_ID,
        )

    threads = [threading.Thread(target=finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rerun.only()[1].state == "failed"


def test_a_lost_answer_to_the_announcement_leaves_one_comment(start: Any, hub: GitHub) -> None:
    rerun = start()
    hub.faults.append(Fault("POST", "/issues/12/comments", status=0, when="after"))
    rerun.announce()
    assert rerun.only()[1].state == "running"


def test_announcing_twice_reuses_comment_and_check_run(start: Any, hub: GitHub) -> None:
    rerun = start()
    first, second = rerun.announce(), rerun.announce()
    assert (first["comment_id"], first["check_id"]) == (second["comment_id"], second["check_id"])
    assert len(hub.checks) == 1


def test_a_body_that_would_be_too_long_keeps_its_marker_and_its_limit() -> None:
    request = Request(1, HEAD, "tests/fast/test_x.py", "", "", "0" * 32, 1, "maria", {})
    rows = [
        Row(f"suite-{n}", "cpu", "failure", 1.0, "https://x", 5, tuple(f"tests/{'y' * 250}_{k}" for k in range(12)))
        for n in range(60)
    ]
    body = final_body(request, 1, 1, "https://x", RerunVerdict("failed"), rows)
    assert len(body) <= 65_536
    assert parse_marker(body) == Marker("rerun", "0" * 32, 1, 1, "failed", HEAD)
    assert "shortened" in body
