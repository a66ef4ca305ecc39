"""Status sweeper: nothing of ours says "running" for ever.

Every half hour: rerun comments still `running` whose run has ended get the true result; those whose run is gone
or far beyond its limit become `lost`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from miles_ci.bot.github import Client, GitHubError
from miles_ci.bot.marker import Marker, ours
from miles_ci.bot.rerun.report import Finding, collect, report
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.verdict import RerunVerdict
from miles_ci.bot.runs import Run, jobs_of, read_run

LOOK_BACK_S = 3 * 86_400
GRACE_S = 30 * 60
# The longest job limit any suite has, plus announce, resolve and report.
DEFAULT_LIMIT_S = 6 * 3600


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def running_comments(client: Client, bot_id: int) -> Iterator[tuple[Mapping[str, Any], Marker]]:
    """Our rerun comments of the last days that still say running."""
    since = _iso(client.clock() - LOOK_BACK_S)
    comments = client.pages("{repo}/issues/comments", sort="updated", direction="desc", since=since)
    for comment, marker in ours(list(comments), bot_id, "rerun"):
        if marker.state == "running":
            yield comment, marker


def sweep(client: Client, *, bot_id: int, limit_s: float = DEFAULT_LIMIT_S) -> list[str]:
    """One pass: a line for each comment that was handled, each on its own, so that one failure does not stop the rest."""
    finished = []
    for comment, marker in running_comments(client, bot_id):
        try:
            done = _finish(client, comment, marker, bot_id, limit_s)
        except GitHubError as error:
            done = f"comment {comment['id']}: {error}"
        if done:
            finished.append(done)
    return finished


def _finish(client: Client, comment: Mapping[str, Any], marker: Marker, bot_id: int, limit_s: float) -> str:
    number = int(str(comment["issue_url"]).rsplit("/", 1)[-1])
    request = _request(comment, marker, number)
    try:
        run: Run | None = read_run(client, marker.run)
    except GitHubError as error:
        if error.status != 404:
            raise
        run = None
    state = None
    if run is None:
        finding = Finding(RerunVerdict("failed", "the run does not exist any more"), ())
        state, url, attempt = "lost", "", marker.attempt
    else:
        url, attempt = run.url, run.attempt
        if run.status != "completed":
            started = run.started_at or run.created_at
            if started is None or client.clock() - started <= limit_s + GRACE_S:
                return ""
            finding = Finding(RerunVerdict("failed", "the run is far beyond its limit"), ())
            state = "lost"
        else:
            finding = collect(client, run.id, run.attempt, _resolve_result(client, run), None)
    done = report(
        client, request, finding, run_id=marker.run, attempt=attempt, run_url=url, comment_id=int(comment["id"]),
        check_id=_check_id(client, request), bot_id=bot_id, state=state,
    )  # fmt: skip
    return f"#{number} request {marker.req}: {state or finding.verdict.state} ({done})"


def _request(comment: Mapping[str, Any], marker: Marker, number: int) -> Request:
    """What the comment itself shows of its request: enough to write the final text."""
    body = str(comment.get("body") or "")
    start = body.find("`")
    end = body.find("`", start + 1)
    file, _, node = (body[start + 1 : end] if 0 <= start < end else "unknown").partition("::")
    return Request(number, marker.sha, file, node, "", marker.req, 0, "", {})


def _resolve_result(client: Client, run: Run) -> str:
    for job in jobs_of(client, run.id, run.attempt):
        if job.name == "resolve":
            return job.result
    return "skipped"


def _check_id(client: Client, request: Request) -> int:
    if not request.head_sha:
        return 0
    try:
        runs = client.pages(
            f"{{repo}}/commits/{request.head_sha}/check-runs", "check_runs", filter="all", status="in_progress"
        )
        return next((int(run["id"]) for run in runs if run.get("external_id") == request.request_id), 0)
    except GitHubError:
        return 0
