"""Comment gateway: one comment in, permission from the API, effects on exact SHAs, one reply out.

A rerun answers by its own comment; the gateway writes only what could not be started, help and refusals.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_ci.bot import access, planning, replies, starting
from miles_ci.bot.access import PullRequest, timestamp
from miles_ci.bot.actions_io import field as event_field
from miles_ci.bot.directives import Directives, Errors, parse_directives
from miles_ci.bot.github import Client, GitHubError, quoted
from miles_ci.bot.grammar import Command, Problem, parse_commands
from miles_ci.bot.marker import ours
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.runs import DispatchLost, dispatch, read_run, to_run
from miles_ci.errors import CiError
from miles_ci.registry import Fleet
from miles_ci.report.escape import code, markdown

HELP_PAUSE_S = 600

Resolve = Callable[[Directives], dict[str, str]]


@dataclass
class Gateway:
    """`client` acts with GITHUB_TOKEN, `app` with the App's token (labels, approvals, dispatches start workflows)."""

    client: Client
    app: Client
    fleet: Fleet
    root: Path
    bot_id: int
    app_id: int
    default_branch: str
    resolve: Resolve
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    done: list[str] = field(default_factory=list)

    def handle(self, event: Mapping[str, Any]) -> list[str]:
        """Follow the commands of one created comment; returns what was done, for the log."""
        if event_field(event, "action", str) != "created" or not event_field(event, "issue", dict).get("pull_request"):
            return ["ignored: not a new comment on a pull request"]
        comment, sender = event_field(event, "comment", dict), event_field(event, "sender", dict)
        author = event_field(event, "comment.user", dict)
        if sender.get("type") != "User" or sender.get("id") != author.get("id"):
            return ["ignored: the sender is not the human author of the comment"]
        labels = {f"run-ci-{name}" for name in self.fleet.labels.domain} | {
            n for n in self.fleet.labels.scope if n.startswith("run-ci-")
        }
        commands = parse_commands(comment.get("body"), labels=labels)
        if not commands:
            return ["ignored: no command"]
        pull = access.read_pull(self.client, event_field(event, "issue.number", int))
        login, parts = event_field(event, "comment.user.login", str), []
        writes = access.can_write(self.client, login)
        quiet = True
        for command in commands:
            text = (
                command.message
                if isinstance(command, Problem)
                else self._follow(command, pull, comment, author, writes)
            )
            if text:
                parts.append(text)
                quiet = quiet and (isinstance(command, Problem) or command.name in ("/help", "/test"))
        if parts:
            self._reply(pull.number, int(comment["id"]), parts, throttled=quiet)
        return self.done

    def _follow(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any], writes: bool
    ) -> str:
        """Check permission and act; returns text for the reply, empty when the effect speaks for itself."""
        login = str(author["login"])
        if not self._allowed(command, pull, author, writes):
            self.done.append(f"{command.name}: denied to {login}")
            return replies.denied(command.name, command.who)
        if pull.state != "open" and command.name not in ("/help", "/test"):
            return "This pull request is closed."
        try:
            return _ACTIONS[command.name](self, command, pull, comment, author)
        except CiError as error:
            self.done.append(f"{command.name}: {error}")
            return f"{code(command.name)} failed: {markdown(str(error), 500)}"

    def _allowed(self, command: Command, pull: PullRequest, author: Mapping[str, Any], writes: bool) -> bool:
        is_author = author.get("id") == pull.author_id
        if command.who == "anyone":
            return True
        if command.who == "reviewer":
            return writes and not is_author
        if command.who == "approved" and not writes:
            return is_author and access.live_approval(self.client, pull, self.app_id) is not None
        return writes

    def _reply(self, number: int, command_id: int, parts: list[str], *, throttled: bool) -> None:
        comments = list(self.client.pages(f"{{repo}}/issues/{number}/comments"))
        if throttled:
            recent = [timestamp(comment.get("created_at")) or 0.0 for comment, _ in ours(comments, self.bot_id, "help")]
            if recent and max(recent) > self.client.clock() - HELP_PAUSE_S:
                self.done.append("reply held back: help was given less than 10 minutes ago")
                return
        kind = "help" if throttled else "reply"

        def proof() -> Any:
            found = ours(self.client.pages(f"{{repo}}/issues/{number}/comments"), self.bot_id, kind, str(command_id))
            return found[0][0] if found else None

        self.client.post(
            f"{{repo}}/issues/{number}/comments", {"body": replies.reply(kind, str(command_id), parts)}, proof=proof
        )
        self.done.append("replied")

    # -- commands -------------------------------------------------------------------------------

    def rerun_test(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        directives = self._directives(pull)
        request = Request(
            pull.number,
            pull.head_sha,
            command.file,
            command.node,
            command.suite,
            self.new_id(),
            int(comment["id"]),
            str(author["login"]),
            directives,
        )
        try:
            run = dispatch(self.app, "rerun-test.yml", self.default_branch, request.inputs(), request.request_id)
        except (DispatchLost, GitHubError) as error:
            self.done.append(f"rerun {request.request_id}: not started")
            return f"The rerun of {code(request.target)} could not be started: {markdown(str(error), 300)}"
        self.done.append(f"rerun {request.request_id}: run {run.id}")
        return ""

    def _directives(self, pull: PullRequest) -> dict[str, str]:
        """Commits for the description's directives; a stranger's are used only as approved."""
        allowed, _, approval = access.may_run_pull(self.client, pull, self.app_id)
        if approval is not None or not allowed:
            return dict(approval.directives) if approval else {}
        parsed = parse_directives(pull.body)
        if isinstance(parsed, Errors):
            raise GitHubError("directives: " + "; ".join(parsed.messages), 422)
        return self.resolve(parsed)

    def rerun_failed(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        lines = []
        for run in starting.latest_runs(self.client, pull.head_sha, status="completed"):
            if run.conclusion not in starting.BAD_ENDINGS:
                continue
            name, why = code(starting.workflow_of(run)), starting.too_old(self.client, run)
            if why:
                lines.append(f"{name} cannot be rerun: its run is {why}.")
                continue
            lines.append(f"{name}: {starting.run_again(self.app, run, command.suite)}")
            self.done.append(f"run {run.id}: {lines[-1]}")
        return "\n".join(lines) or f"No failed, timed-out or cancelled run for {code(pull.head_sha[:12])}."

    def ok_to_test(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        if not pull.head_sha.startswith(command.sha):
            return f"The head is {code(pull.head_sha[:12])}, not {code(command.sha[:12])}: review it and approve that commit."
        directives = access.resolved_directives(pull, self.resolve)
        if isinstance(directives, Errors):
            return "Not approved, the directives are wrong: " + "; ".join(markdown(m, 200) for m in directives.messages)
        approval = access.Approval(pull.head_sha, int(author["id"]), directives, access.directives_hash(pull.body))
        access.store_approval(self.app, approval)
        started = starting.start_approved(self.app, pull, self.default_branch, self.new_id())
        self.done.append(f"approved {pull.head_sha}")
        return "\n".join([f"Approved {code(pull.head_sha[:12])}.", *(f"- {line}" for line in started)])

    def not_ok_to_test(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        access.withdraw(self.app, pull.head_sha, int(author["id"]))
        count = self._cancel_runs(pull)
        return f"Withdrawn for {code(pull.head_sha[:12])}; {count} runs cancelled."

    def cancel(self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]) -> str:
        return f"{self._cancel_runs(pull)} runs of {code(pull.head_sha[:12])} cancelled."

    def _cancel_runs(self, pull: PullRequest) -> int:
        """Runs of this commit, and dispatched ones that carry it in their name."""
        count, seen = 0, set()
        for status in ("queued", "in_progress", "waiting", "requested", "pending"):
            for entry in self.app.pages("{repo}/actions/runs", "workflow_runs", status=status):
                run = to_run(entry)
                if run.id in seen or not (run.head_sha == pull.head_sha or pull.head_sha in run.title):
                    continue
                seen.add(run.id)
                self.app.post(
                    f"{{repo}}/actions/runs/{run.id}/cancel", {}, proof=functools.partial(_ended, self.app, run.id)
                )
                count += 1
        self.done.append(f"cancelled {count} runs")
        return count

    def add_label(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        name = command.label or "bypass-fastfail"
        labels = self.app.post(
            f"{{repo}}/issues/{pull.number}/labels", {"labels": [name]}, proof=lambda: self._labels(pull, name)
        )
        if name not in {label["name"] for label in labels}:
            return f"Label {code(name)} was not added."
        self.done.append(f"label {name}")
        return ""

    def _labels(self, pull: PullRequest, name: str) -> Any:
        labels = self.app.get(f"{{repo}}/issues/{pull.number}/labels", per_page=100)
        return labels if name in {label["name"] for label in labels} else None

    def clear_labels(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        ours_ = {*self.fleet.labels.scope, *self.fleet.labels.behaviour} - {access.LABEL}
        for name in pull.labels:
            if name in ours_ or name.startswith("run-ci-"):
                remove_label(self.app, pull.number, name)
                self.done.append(f"removed {name}")
        return ""

    def lint(self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]) -> str:
        request_id = self.new_id()
        inputs = {"head_sha": pull.head_sha, "pull_number": str(pull.number), "request_id": request_id}
        run = dispatch(self.app, "lint-patch.yml", self.default_branch, inputs, request_id)
        self.done.append(f"lint: run {run.id}")
        return ""

    def test_list(
        self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]
    ) -> str:
        event = {"pull_request": {"labels": [{"name": name} for name in pull.labels]}}
        suites = list(self.fleet.suites)
        plan, _, fleet = planning.make_plan(
            event=event, cadence="regular", root=self.root, registry=self.root / "registry.yaml", suites=suites
        )
        return replies.suites_text(fleet, plan, planning.disabled_pools(fleet, suites))

    def help(self, command: Command, pull: PullRequest, comment: Mapping[str, Any], author: Mapping[str, Any]) -> str:
        return replies.help_text()


def _ended(client: Client, run_id: int) -> Any:
    run = read_run(client, run_id)
    return run if run.status == "completed" else None


def remove_label(app: Client, number: int, name: str) -> None:
    """Remove a label; one that is gone already is fine."""
    try:
        app.delete(f"{{repo}}/issues/{number}/labels/{quoted(name)}")
    except GitHubError as error:
        if error.status != 404:
            raise


_ACTIONS: dict[str, Callable[..., str]] = {
    "/rerun-test": Gateway.rerun_test,
    "/rerun-failed": Gateway.rerun_failed,
    "/ok-to-test": Gateway.ok_to_test,
    "/not-ok-to-test": Gateway.not_ok_to_test,
    "/run-ci": Gateway.add_label,
    "/bypass-fastfail": Gateway.add_label,
    "/clear-labels": Gateway.clear_labels,
    "/cancel": Gateway.cancel,
    "/lint": Gateway.lint,
    "/test": Gateway.test_list,
    "/help": Gateway.help,
}
