"""Texts of the gateway's replies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from miles_ci.bot.grammar import COMMANDS
from miles_ci.bot.marker import Marker
from miles_ci.plan.model import Plan
from miles_ci.registry import Fleet
from miles_ci.report.escape import code, markdown

_WHO = {
    "anyone": "anyone",
    "write": "write access",
    "approved": "write access, or the author of an approved commit",
    "reviewer": "write access, not the author",
}


def help_text() -> str:
    rows = [f"| `{usage}` | {_WHO[who]} |" for usage, who in COMMANDS.values()]
    return "\n".join(
        ["| command | who |", "|---|---|", *rows, "", "One command a line, at column 0, at most five a comment."]
    )


def reply(kind: str, key: str, parts: Sequence[str]) -> str:
    """A reply comment with its marker; `key` is what it answers."""
    return "\n".join([Marker(kind, req=key).line(), "\n\n".join(parts)])


def suites_text(fleet: Fleet, plan: Plan, off: dict[str, str]) -> str:
    """What `/test ?` answers: suites with what the labels of this pull request select, and why not."""
    lines = ["| suite | hardware | tests | note |", "|---|---|---|---|"]
    for item in plan.suites:
        suite = fleet.suites[item.suite]
        note = off.get(item.suite) or item.reason or ""
        lines.append(
            f"| `{item.suite}` | {', '.join(suite.hardware)} x {suite.gpus or 'cpu'} | {item.selected} | {markdown(note, 160)} |"
        )
    labels = ", ".join(f"`run-ci-{name}`" for name in fleet.labels.domain)
    scopes = ", ".join(f"`{name}`" for name in [*fleet.labels.scope, *fleet.labels.behaviour])
    return "\n".join([*lines, "", f"Labels: {labels}", "", f"Scope and behaviour: {scopes}"])


def denied(command: str, who: str) -> str:
    return f"{code(command)} needs {_WHO[who]}."
