"""First job of a rerun: the comment that says "running", and the check run on the head commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_ci.bot.github import Client, GitHubError
from miles_ci.bot.marker import Marker
from miles_ci.bot.rerun.comment import running_body
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.state import write_state


@dataclass(frozen=True)
class Announced:
    """`check_id` 0: GitHub refused a check run; `note` says so."""

    comment_id: int
    check_id: int
    note: str = ""


def announce(client: Client, request: Request, *, run_id: int, attempt: int, run_url: str, bot_id: int) -> Announced:
    """Create or reuse the one comment of this request. Safe to repeat; never takes back a newer or final state."""
    body = running_body(request, run_id, attempt, run_url)
    marker = Marker("rerun", request.request_id, run_id, attempt, "running", request.head_sha)
    written = write_state(client, request, marker, body, bot_id=bot_id)
    check_id, note = start_check(client, request, run_url)
    return Announced(written.comment_id, check_id, note)


def start_check(client: Client, request: Request, run_url: str) -> tuple[int, str]:
    """A check run in progress; 403 and 422 leave the comment as the only report."""

    def proof() -> dict[str, Any] | None:
        path = f"{{repo}}/commits/{request.head_sha}/check-runs"
        runs = client.pages(path, "check_runs", check_name=request.check_name, filter="all")
        return next((run for run in runs if run.get("external_id") == request.request_id), None)

    body = {
        "name": request.check_name,
        "head_sha": request.head_sha,
        "status": "in_progress",
        "details_url": run_url,
        "external_id": request.request_id,
    }
    try:
        existing = proof()
        check = existing or client.post("{repo}/check-runs", body, proof=proof)
    except GitHubError as error:
        if error.status in (403, 422):
            return 0, f"no check run: GitHub answered {error.status}"
        raise
    return int(check["id"]), ""
