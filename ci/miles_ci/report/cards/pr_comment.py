"""The pull-request card as Markdown, and the job summary, which holds the same and more."""

from __future__ import annotations

from miles_ci.report.cards.model import Card, RowGroup, reason_text, skipped_lines, totals
from miles_ci.report.escape import code, markdown

LIMIT = 65_536
MAX_TESTS = 10
FEWER_LINKS = (200, 100, 50, 20, 10)
_SIGN = {"success": "✔", "failure": "✘", "cancelled": "■"}


def _group(group: RowGroup, most: int | None) -> list[str]:
    linked = group.jobs[:most]
    links = ", ".join(f"[{markdown(job.name, 80)}]({job.url})" if job.url else markdown(job.name, 80) for job in linked)
    if len(linked) < len(group.jobs):
        links += f" … and {len(group.jobs) - len(linked)} more jobs"
    lines = [f"**{links}**"]
    for item in group.analyses[:MAX_TESTS]:
        tags = f" ({', '.join(item.tags)})" if item.tags else ""
        related = f", see #{item.related_pr}" if item.related_pr else ""
        lines.append(
            f"- {code(item.test_name or 'the job', 300)}: {markdown(reason_text(item.reason), 280)}{tags}{related}"
        )
    if len(group.analyses) > MAX_TESTS:
        lines.append(f"- … and {len(group.analyses) - MAX_TESTS} more tests")
    return [*lines, ""]


def blocks(card: Card, *, links: int | None = None) -> list[str]:
    """The card in blocks, most important first; cutting between blocks keeps it readable. `links`: most of a row."""
    head = f"### {_SIGN.get(card.result, '?')} {markdown(card.title, 120)}"
    commit = f" at {code(card.commit[:12])}" if card.commit else ""
    out = [f"{head}\n\n**{totals(card.report)}**{commit} · {markdown(card.when, 40)} · [run]({card.url})\n"]
    out += ["\n".join(_group(group, links)) for group in card.shown]
    if card.more:
        out.append(f"{card.more}\n")
    report = card.report
    sections = [
        ("Never executed (planned, never observed)", [code(name, 300) for name in report.never_executed]),
        ("Faults", [markdown(fault, 300) for fault in report.faults]),
        ("Skipped suites", [markdown(line, 300) for line in skipped_lines(report.skipped)]),
        ("Flaky (passed on retry)", [code(name, 300) for name in report.flaky]),
        ("Unstable (failed, does not block)", [code(name, 300) for name in report.unstable]),
        ("Left processes behind", [code(name, 300) for name in report.leaked]),
        (
            "Slowest",
            [f"{code(slow.path, 300)} {slow.seconds:.1f} s ({markdown(slow.suite, 64)})" for slow in report.slowest],
        ),
        ("Notes", [markdown(note, 300) for note in card.notes]),
    ]
    for title, lines in sections:
        if lines:
            out.append("\n".join([f"**{title}**", *(f"- {line}" for line in lines), ""]))
    return out


def render(card: Card, *, marker: str = "", limit: int = LIMIT) -> str:
    """Markdown of at most `limit` characters; the marker and the first block always stay.

    A row keeps the links of all its jobs as long as anything does; then rows lose links before the card loses rows.
    """
    for links in (None, *FEWER_LINKS):
        parts = ([marker] if marker else []) + blocks(card, links=links)
        text = "\n".join(parts)
        if len(text) <= limit:
            return text
    note = "… (shortened: see the run)"
    keep = parts[: 2 if marker else 1]
    for part in parts[len(keep) :]:
        if len("\n".join([*keep, part, note])) > limit:
            break
        keep.append(part)
    return "\n".join([*keep, note])
