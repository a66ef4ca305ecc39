"""The job summary: the pull-request card, then every failing test with its message."""

from __future__ import annotations

from miles_ci.report.cards.model import Card
from miles_ci.report.cards.pr_comment import blocks
from miles_ci.report.escape import code, markdown

LIMIT = 1024 * 1024 - 4096


def render(card: Card) -> str:
    """Markdown below GitHub's 1 MiB; failing tests are never left out before their messages are."""
    parts = blocks(card)
    failed = card.report.failed
    if failed:
        rows = [
            f"| {code(test.node, 300)} | {markdown(test.suite, 64)} | {test.category} | {markdown(test.message, 500)} |"
            for test in failed
        ]
        short = [f"| {code(test.node, 300)} | {markdown(test.suite, 64)} | {test.category} | |" for test in failed]
        head = ["**Failing tests**", "", "| test | suite | kind | message |", "|---|---|---|---|"]
        table = "\n".join([*head, *rows])
        if len("\n".join([*parts, table]).encode()) > LIMIT:
            table = "\n".join([*head, *short])
        parts.append(table)
    return "\n".join(parts) + "\n"
