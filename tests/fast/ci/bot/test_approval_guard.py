"""One guard before every machine of ours: forks, leftover labels, lost permissions, and what an approval starts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from miles_ci.bot import access
from miles_ci.bot.github import Client
from tests.fast.ci.bot.conftest import HEAD, Job, comment_event
from tests.fast.ci.bot.helpers.github_server import APP_ID, GitHub
from tests.fast.ci.bot.test_approval_security import NUMBER, authorise, fork, request_env, store

__all__ = ["fork"]
PULL = {"GITHUB_EVENT_NAME": "pull_request"}
GPU = request_env(TEST_FILE="tests/fast-gpu/test_kernel.py", GITHUB_RUN_ID="1")


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_ci.bot.oci.Registry.digest", lambda self, text: "sha256:" + "ab" * 32)


def test_a_leftover_run_label_opens_nothing_for_a_forks_next_push(fork: GitHub, app: Client, job: Job) -> None:
    fork.labels[NUMBER] = ["run-ci-kernels"]
    store(app)
    assert authorise(job, **PULL) == 0
    fork.pulls[NUMBER]["head"]["sha"] = "c3" * 20
    assert authorise(job, "c3" * 20, **PULL) == 1


def test_a_forks_run_sees_no_variables_so_the_registry_names_the_app(
    fork: GitHub, app: Client, job: Job, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(app)
    assert authorise(job, APP_ID="", **PULL) == 1
    assert "approval_app in registry.yaml" in capsys.readouterr().out
    rewrite(checkout / "registry.yaml", "version: 1\n", f"version: 1\napproval_app: {APP_ID}\n")
    assert authorise(job, APP_ID="", **PULL) == 0
    assert authorise(job, **PULL) == 0
    rewrite(checkout / "registry.yaml", f"approval_app: {APP_ID}", f"approval_app: {APP_ID + 1}")
    assert authorise(job, APP_ID="", **PULL) == 1  # another app's approvals do not count
    capsys.readouterr()
    assert authorise(job, **PULL) == 2
    assert f"APP_ID is {APP_ID}, but registry.yaml says approval_app: {APP_ID + 1}" in capsys.readouterr().err


def test_a_maintainers_own_branch_needs_neither_approval_nor_app(hub: GitHub, job: Job) -> None:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="maria", sha=HEAD)
    assert authorise(job, APP_ID="", **PULL) == 0
    assert authorise(job, APP_ID="x", **PULL) == 2


def test_a_rerun_of_an_older_fork_commit_is_not_covered_by_the_approval_of_the_head(
    fork: GitHub, app: Client, job: Job, images: None
) -> None:
    store(app)
    assert job("resolve", "--root", ".", **GPU)[1]["count_cuda"] == "1"
    assert job("resolve", "--root", ".", **(GPU | {"HEAD_SHA": "c3" * 20}))[0] == 2


def test_a_rerun_on_a_branch_of_somebody_who_lost_write_access_waits_for_approval(
    hub: GitHub, app: Client, job: Job, images: None
) -> None:
    hub.user("maria", "write")
    hub.user("carl", "write")
    hub.pull(NUMBER, author="carl", sha=HEAD)
    assert job("resolve", "--root", ".", **GPU)[1]["sha"] == HEAD
    hub.permissions["carl"] = "read"
    assert job("resolve", "--root", ".", **GPU)[0] == 2
    store(app, actor=hub.users["maria"])
    assert job("resolve", "--root", ".", **GPU)[1]["count_cuda"] == "1"


def test_directives_of_somebody_without_write_access_are_used_only_as_approved(
    hub: GitHub, app: Client, job: Job
) -> None:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="carl", sha=HEAD, body="ci-image-tag: v1\n")
    command = "/rerun-test tests/fast/sample/test_good.py"
    job("gateway", event=comment_event(hub, NUMBER, command, "maria"))
    assert json.loads(hub.dispatched[-1][1]["directives"]) == {}
    store(
        app,
        actor=hub.users["maria"],
        directives={"ci-image-tag": "v0"},
        hash=access.directives_hash("ci-image-tag: v1"),
    )
    job("gateway", event=comment_event(hub, NUMBER, command, "maria"))
    assert json.loads(hub.dispatched[-1][1]["directives"]) == {"ci-image-tag": "v0"}
    hub.permissions["carl"] = "write"
    job("gateway", event=comment_event(hub, NUMBER, command, "maria"))
    assert json.loads(hub.dispatched[-1][1]["directives"]) == {"ci-image-tag": "v1"}


def test_a_cpu_suite_on_machines_of_ours_is_refused_to_an_unapproved_fork(
    fork: GitHub, app: Client, job: Job, checkout: Path
) -> None:
    cpu = request_env(GITHUB_RUN_ID="1")
    assert job("resolve", "--root", ".", **cpu)[1]["count_cpu"] == "1"
    rewrite(checkout / "registry.yaml", "runs_on: [ubuntu-24.04]", "runs_on: [self-hosted, cpu-pool]")
    assert job("resolve", "--root", ".", **cpu)[0] == 2
    store(app)
    code, outputs = job("resolve", "--root", ".", **cpu)
    assert code == 0
    assert json.loads(outputs["matrix_cpu"])["include"][0]["runs_on"] == ["self-hosted", "cpu-pool"]


def test_the_plan_counts_what_would_run_on_machines_of_ours(hub: GitHub, job: Job, checkout: Path) -> None:
    suites = "stage-a-cpu stage-b-1-gpu-h200"
    arguments = ("plan", "--cadence", "regular", "--root", ".", "--suites", suites, "--output", "plan.json")

    def counted(*labels: str) -> tuple[str, str]:
        event = {"pull_request": {"labels": [{"name": name} for name in labels]}}
        outputs = job(*arguments, event=event)[1]
        return outputs["count-gpu"], outputs["count-self-hosted"]

    assert counted() == ("0", "0")
    assert counted("run-ci-kernels") == ("1", "1")
    rewrite(checkout / "registry.yaml", "runs_on: [ubuntu-24.04]", "runs_on: [self-hosted, cpu-pool]")
    assert counted() == ("0", "3")
    assert counted("run-ci-kernels") == ("1", "4")


# What the approval finds of the CUDA run -> what the reply says, and whether the run starts again.
CUDA = [
    ({"status": "completed", "conclusion": "failure"}, "attempt 2 started", True),
    ({"status": "completed", "conclusion": "cancelled"}, "attempt 2 started", True),
    ({"status": "completed", "conclusion": "timed_out"}, "attempt 2 started", True),
    ({"status": "completed", "conclusion": "success"}, "had nothing that needs the approval", False),
    ({"status": "completed", "conclusion": "action_required"}, "GitHub's own approval", False),
    ({"status": "in_progress"}, "has not ended", False),
    ({"status": "completed", "conclusion": "failure", "head_sha": "9" * 40}, "GitHub's own approval", False),
    (
        {"status": "completed", "conclusion": "failure", "started": time.time() - 31 * 86_400},
        "older than 30 days",
        False,
    ),
]


@pytest.mark.parametrize(("values", "says", "again"), CUDA)
def test_an_approval_asks_the_guard_of_the_cuda_run_again(
    fork: GitHub, job: Job, values: dict, says: str, again: bool
) -> None:
    run = fork.run("pr-test.yml", title="x", event="pull_request", **({"head_sha": HEAD} | values))
    job("gateway", event=comment_event(fork, NUMBER, f"/ok-to-test {HEAD[:12]}", "maria"))
    reply = fork.comments_of(NUMBER)[-1]["body"]
    assert f"Approved `{HEAD[:12]}`" in reply
    assert "- ROCm: [started](" in reply
    assert says in next(line for line in reply.splitlines() if line.startswith("- CUDA: ")).replace("’", "'")
    assert (fork.runs[run["id"]]["run_attempt"] == 2) is again


def test_a_lane_that_cannot_be_started_does_not_hold_up_the_other(fork: GitHub, job: Job) -> None:
    fork.lose_dispatch = True
    run = fork.run(
        "pr-test.yml", title="x", status="completed", conclusion="failure", head_sha=HEAD, event="pull_request"
    )
    job("gateway", event=comment_event(fork, NUMBER, f"/ok-to-test {HEAD[:12]}", "maria"))
    reply = fork.comments_of(NUMBER)[-1]["body"]
    assert "- ROCm: could not be started" in reply
    assert fork.runs[run["id"]]["run_attempt"] == 2
