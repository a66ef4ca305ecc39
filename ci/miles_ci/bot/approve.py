"""`approve-trusted.yml`: the label form of an approval, and what a push does to it.

The label names no commit, so it is refused whenever a push may have come between review and label, and it is
removed at once in every case: an approval lives in the check run of one SHA, not in a label.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from miles_ci.bot import access
from miles_ci.bot.actions_io import field
from miles_ci.bot.directives import Errors
from miles_ci.bot.gateway import Resolve, remove_label
from miles_ci.bot.github import Client
from miles_ci.bot.marker import ours
from miles_ci.bot.replies import reply
from miles_ci.bot.starting import start_approved
from miles_ci.report.escape import code, markdown


def labelled_at(client: Client, number: int, actor_id: int) -> float | None:
    """When the label was last added, by the issue's event log (the webhook carries no time)."""
    newest = None
    for entry in client.pages(f"{{repo}}/issues/{number}/events"):
        label = (entry.get("label") or {}).get("name")
        if (
            entry.get("event") == "labeled"
            and label == access.LABEL
            and (entry.get("actor") or {}).get("id") == actor_id
        ):
            at = access.timestamp(entry.get("created_at"))
            newest = max(newest or 0.0, at) if at is not None else newest
    return newest


def approve(
    event: Mapping[str, Any],
    *,
    client: Client,
    app: Client,
    resolve: Resolve,
    bot_id: int,
    default_branch: str,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> str:
    """Handle `labeled` and `synchronize`; returns what was decided."""
    number = field(event, "pull_request.number", int)
    action = field(event, "action", str)
    if action == "synchronize":
        remove_label(app, number, access.LABEL)
        return "a push: the label is removed, approvals of other commits do not count"
    if action != "labeled" or field(event, "label.name", str) != access.LABEL:
        return "ignored"
    sender = field(event, "sender", dict)
    pull = access.read_pull(client, number)
    remove_label(app, number, access.LABEL)
    problem = _refusal(event, client, pull, sender)
    if problem is None:
        directives = access.resolved_directives(pull, resolve)
        if isinstance(directives, Errors):
            problem = "the directives are wrong: " + "; ".join(directives.messages)
        else:
            approval = access.Approval(pull.head_sha, int(sender["id"]), directives, access.directives_hash(pull.body))
            access.store_approval(app, approval)
            started = start_approved(app, pull, default_branch, new_id())
            return "\n".join([f"approved {pull.head_sha}", *started])
    form = f"/ok-to-test {pull.head_sha[:12]}"
    text = f"Not approved: {markdown(problem, 400)}. After reviewing the commit, comment {code(form)}."
    key = field(event, "pull_request.head.sha", str)

    def proof() -> Any:
        found = ours(client.pages(f"{{repo}}/issues/{number}/comments"), bot_id, "approval", key)
        return found[0][0] if found else None

    if proof() is None:
        client.post(
            f"{{repo}}/issues/{number}/comments",
            {"body": reply("approval", key, [text])},
            proof=proof,
        )
    return f"refused: {problem}"


def _refusal(
    event: Mapping[str, Any], client: Client, pull: access.PullRequest, sender: Mapping[str, Any]
) -> str | None:
    if sender.get("type") != "User":
        return "the label was not added by a person"
    if sender.get("id") == pull.author_id:
        return "the author cannot approve their own commit"
    if not access.can_write(client, str(sender.get("login"))):
        return "whoever added the label has no write access"
    at = labelled_at(client, pull.number, int(sender["id"]))
    if at is None:
        return "the event log does not show when the label was added"
    return access.label_is_fresh(pull, field(event, "pull_request.head.sha", str), at)
