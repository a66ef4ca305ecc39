"""Who may do what, and which exact commit was approved.

Permission comes from the collaborator endpoint alone (`admin` and `write`; maintain shows as write, triage as
read), never from `author_association`. An approval is a check run on one SHA, trusted only with our app's id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from miles_ci.bot.directives import Directives, Errors, parse_directives
from miles_ci.bot.github import Client, GitHubError, quoted
from miles_ci.report.strict_json import StrictJsonError, loads

CHECK_NAME = "ci-approval"
LABEL = "ok-to-test"
STALE_S = 120


def can_write(client: Client, login: str) -> bool:
    """Whether a person has write access now. An unknown person has none."""
    try:
        answer = client.get(f"{{repo}}/collaborators/{quoted(login)}/permission")
    except GitHubError as error:
        if error.status == 404:
            return False
        raise
    return isinstance(answer, Mapping) and answer.get("permission") in ("admin", "write")


@dataclass(frozen=True)
class PullRequest:
    """The live state of a pull request, read from the API and never from the event."""

    number: int
    head_sha: str
    head_repo: str
    base_repo: str
    author_id: int
    author_login: str
    body: str
    state: str
    pushed_at: float
    labels: tuple[str, ...] = ()

    @property
    def is_fork(self) -> bool:
        # A deleted fork has no repository: certainly not ours.
        return self.head_repo != self.base_repo


def read_pull(client: Client, number: int) -> PullRequest:
    data = client.get(f"{{repo}}/pulls/{number}")
    head_repo = (data["head"].get("repo") or {}) if isinstance(data["head"], Mapping) else {}
    return PullRequest(
        number=data["number"],
        head_sha=data["head"]["sha"],
        head_repo=head_repo.get("full_name") or "",
        base_repo=data["base"]["repo"]["full_name"],
        author_id=data["user"]["id"],
        author_login=data["user"]["login"],
        body=data.get("body") or "",
        state=data["state"],
        pushed_at=timestamp(head_repo.get("pushed_at")) or 0.0,
        labels=tuple(label["name"] for label in data.get("labels") or []),
    )


def timestamp(text: Any) -> float | None:
    """Seconds since the epoch of an API time, None when missing or malformed."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).astimezone(timezone.utc).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True)
class Approval:
    """One person's approval of one commit with the dependency commits that were resolved then."""

    sha: str
    actor_id: int
    directives: Mapping[str, str]
    body_hash: str


def directives_hash(body: str) -> str:
    """Hash of the directives of a description; other edits to the text do not void an approval."""
    parsed = parse_directives(body)
    value = list(parsed.messages) if isinstance(parsed, Errors) else parsed.as_json()
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def approval_text(approval: Approval) -> str:
    values = {"v": 1, "directives": dict(approval.directives), "hash": approval.body_hash}
    return json.dumps(values, sort_keys=True)


def live_approval(client: Client, pull: PullRequest, app_id: int) -> Approval | None:
    """The approval of exactly the live head, if it still stands.

    Ignored: check runs of other apps, withdrawn (neutral) ones, the author's own, and approvals whose
    directives have been edited since.
    """
    query = {"check_name": CHECK_NAME, "filter": "latest", "app_id": app_id}
    runs = list(client.pages(f"{{repo}}/commits/{pull.head_sha}/check-runs", "check_runs", **query))
    ours = [run for run in runs if (run.get("app") or {}).get("id") == app_id and run.get("head_sha") == pull.head_sha]
    for run in sorted(ours, key=lambda run: run["id"], reverse=True)[:1]:
        if run.get("status") != "completed" or run.get("conclusion") != "success":
            return None
        approval = _read_approval(run)
        if approval is None or approval.actor_id == pull.author_id:
            return None
        return approval if approval.body_hash == directives_hash(pull.body) else None
    return None


def _read_approval(run: Mapping[str, Any]) -> Approval | None:
    try:
        data = loads((run.get("output") or {}).get("text") or "")
        actor = int(str(run.get("external_id")))
    except (StrictJsonError, ValueError):
        return None
    if not isinstance(data, dict) or data.get("v") != 1 or not isinstance(data.get("directives"), dict):
        return None
    directives = {str(name): str(value) for name, value in data["directives"].items()}
    return Approval(str(run["head_sha"]), actor, directives, str(data.get("hash", "")))


def store_approval(app: Client, approval: Approval) -> None:
    """Write the check run with the App's token."""
    app.post(
        "{repo}/check-runs",
        {
            "name": CHECK_NAME,
            "head_sha": approval.sha,
            "status": "completed",
            "conclusion": "success",
            "external_id": str(approval.actor_id),
            "output": {
                "title": "Approved for self-hosted runners",
                "summary": f"Exactly {approval.sha} may run. A later push needs a new approval.",
                "text": approval_text(approval),
            },
        },
    )


def withdraw(app: Client, sha: str, actor_id: int) -> None:
    """A neutral check run on the same commit: the latest one counts."""
    body = {"title": "Approval withdrawn", "summary": f"{sha} may no longer run on self-hosted runners."}
    run = {
        "name": CHECK_NAME,
        "head_sha": sha,
        "status": "completed",
        "conclusion": "neutral",
        "external_id": str(actor_id),
    }
    app.post("{repo}/check-runs", {**run, "output": body})


def label_is_fresh(pull: PullRequest, event_sha: str, labelled_at: float) -> str | None:
    """Why the label form is refused, or None. A push may have slipped in between review and label."""
    if pull.head_sha != event_sha:
        return f"the head moved from {event_sha[:12]} to {pull.head_sha[:12]} before the label was read"
    if pull.pushed_at > labelled_at - STALE_S:
        return f"the fork was pushed to within {STALE_S} s of the label, so it is unclear which commit was reviewed"
    return None


def resolved_directives(pull: PullRequest, resolve: Callable[[Directives], dict[str, str]]) -> dict[str, str] | Errors:
    """Directives of the live description as commits: name -> 40 hex digits or image tag."""
    parsed = parse_directives(pull.body)
    if isinstance(parsed, Errors):
        return parsed
    return resolve(parsed)


def may_run_pull(client: Client, pull: PullRequest, app_id: int | None) -> tuple[bool, str, Approval | None]:
    """Whether the live head may run on self-hosted machines: (allowed, why, the approval if one decided).

    `app_id` None: nobody said whose approvals count, so none does.
    """
    if not pull.is_fork and can_write(client, pull.author_login):
        return True, f"same repository, {pull.author_login} has write access", None
    if app_id is None:
        return (
            False,
            (
                f"{pull.head_sha} needs an approval, and no App is named whose approvals count: set the repository variable "
                "MILES_CI_APP_ID, and approval_app in registry.yaml, because runs of forks see no variables"
            ),
            None,
        )
    approval = live_approval(client, pull, app_id)
    if approval is not None:
        return True, f"{pull.head_sha[:12]} is approved", approval
    form = f"`/ok-to-test {pull.head_sha[:12]}`"
    return False, f"{pull.head_sha} has no approval: a reviewer with write access comments {form}", None


__all__ = [
    "CHECK_NAME",
    "LABEL",
    "Approval",
    "Directives",
    "PullRequest",
    "can_write",
    "label_is_fresh",
    "live_approval",
    "may_run_pull",
    "read_pull",
    "store_approval",
    "withdraw",
]
