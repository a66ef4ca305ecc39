"""Starting runs again: what failed of a commit, and what an approval lets through.

A run is started by the App, since GITHUB_TOKEN starts none, and only what is seen afterwards is called started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_ci.bot.access import PullRequest
from miles_ci.bot.github import Client
from miles_ci.bot.runs import Run, dispatch, jobs_of, read_run, to_run
from miles_ci.errors import CiError
from miles_ci.report.escape import code, markdown

CUDA_WORKFLOW, ROCM_WORKFLOW = "pr-test.yml", "pr-test-rocm.yml"
RERUN_WORKFLOWS = (CUDA_WORKFLOW, ROCM_WORKFLOW)
BAD_ENDINGS = ("failure", "timed_out", "cancelled")
MAX_AGE_S = 30 * 86_400
MAX_ATTEMPT = 50
APPEAR_S = 30.0


def workflow_of(run: Run) -> str:
    """File name of the workflow that a run belongs to."""
    return run.path.split("@")[0].rsplit("/", 1)[-1]


def latest_runs(client: Client, sha: str, **query: str) -> list[Run]:
    """The newest run of each test workflow for exactly this commit."""
    newest: dict[str, Run] = {}
    for entry in client.pages("{repo}/actions/runs", "workflow_runs", head_sha=sha, **query):
        run = to_run(entry)
        name = workflow_of(run)
        if name in RERUN_WORKFLOWS and run.head_sha == sha and (name not in newest or run.id > newest[name].id):
            newest[name] = run
    return [newest[name] for name in sorted(newest)]


def too_old(client: Client, run: Run) -> str | None:
    """Why GitHub would not run this again, None when it would."""
    if client.clock() - (run.created_at or 0.0) > MAX_AGE_S:
        return "older than 30 days"
    return f"at attempt {run.attempt} of {MAX_ATTEMPT}" if run.attempt >= MAX_ATTEMPT else None


def run_again(app: Client, run: Run, suite: str = "") -> str:
    """Run the failed jobs of a run again, or those of one suite; the text is for the reply."""
    path = f"{{repo}}/actions/runs/{run.id}/rerun-failed-jobs"
    if suite:
        jobs = [
            job
            for job in jobs_of(app, run.id, run.attempt)
            if f"{suite} " in f"{job.name} " and job.result in ("failure", "cancelled")
        ]
        if not jobs:
            return f"no failed job of {code(suite)}"
        if len(jobs) == 1:
            path = f"{{repo}}/actions/jobs/{jobs[0].id}/rerun"

    def proof() -> Any:
        now = read_run(app, run.id)
        return {"attempt": now.attempt} if now.attempt > run.attempt else None

    app.post(path, {}, proof=proof)
    deadline = app.clock() + APPEAR_S
    while app.clock() < deadline:
        now = read_run(app, run.id)
        if now.attempt > run.attempt:
            return f"attempt {now.attempt} started, [run]({now.url})"
        app.sleep(3)
    return f"GitHub accepted the request, but no new attempt of [the run]({run.url}) appeared"


def start_approved(app: Client, pull: PullRequest, default_branch: str, request_id: str) -> list[str]:
    """What an approval of the head starts: the ROCm run, and the guard of the CUDA run again. Lines for the reply."""
    lanes: dict[str, Callable[[], str]] = {
        "ROCm": lambda: _rocm(app, pull, default_branch, request_id),
        "CUDA": lambda: _cuda(app, pull),
    }
    lines = []
    for lane, start in lanes.items():
        try:
            lines.append(f"{lane}: {start()}")
        except CiError as error:
            lines.append(f"{lane}: could not be started: {markdown(str(error), 200)}")
    return lines


def _rocm(app: Client, pull: PullRequest, default_branch: str, request_id: str) -> str:
    inputs = {"head_sha": pull.head_sha, "pull_number": str(pull.number), "request_id": request_id}
    return f"[started]({dispatch(app, ROCM_WORKFLOW, default_branch, inputs, request_id).url})"


def _cuda(app: Client, pull: PullRequest) -> str:
    found = [run for run in latest_runs(app, pull.head_sha) if workflow_of(run) == CUDA_WORKFLOW]
    if not found or found[0].conclusion == "action_required":
        return "its run waits for GitHub's own approval of a stranger's workflow, on the pull request's page"
    run = found[0]
    if run.status != "completed":
        return f"[the run]({run.url}) has not ended; if `authorise` failed there, comment `/rerun-failed` when it has"
    if run.conclusion not in BAD_ENDINGS:
        return f"[the run]({run.url}) had nothing that needs the approval"
    why = too_old(app, run)
    return f"[its run]({run.url}) is {why}, push again" if why else run_again(app, run)
