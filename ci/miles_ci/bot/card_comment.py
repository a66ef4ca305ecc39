"""The one comment of a pull request that all its test workflows share, a section for each.

Two workflows, and an older and a newer run of one, end at the same time: a section about a newer run is never
replaced by an older one, and no writer drops another workflow's section.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_ci.bot.github import COMMENT_LIMIT, Client
from miles_ci.bot.marker import Marker
from miles_ci.bot.one_comment import Standing, settle
from miles_ci.bot.runs import Run
from miles_ci.bot.starting import workflow_of
from miles_ci.report.cards import Card, pr_comment

_SECTION = re.compile(
    r"<!-- section (?P<name>[A-Za-z0-9._-]+) (?P<run>\d{1,18})\.(?P<attempt>\d{1,9}) -->\n"
    r"(?P<text>.*?)(?=<!-- section |\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Section:
    """What one workflow says; `order` is (run, attempt) of the run that it is about."""

    order: tuple[int, int]
    text: str


def sections_of(body: str) -> dict[str, Section]:
    """Workflow file -> its section of a comment of ours."""
    return {
        found["name"]: Section((int(found["run"]), int(found["attempt"])), found["text"].strip("\n"))
        for found in _SECTION.finditer(body.replace("\r\n", "\n"))
    }


def newest(*parts: Mapping[str, Section]) -> dict[str, Section]:
    """Each workflow's section about its newest run; of equals the first part's."""
    out: dict[str, Section] = {}
    for part in parts:
        for name, section in part.items():
            if name not in out or section.order > out[name].order:
                out[name] = section
    return out


def join_sections(sections: Mapping[str, Section]) -> str:
    """The inverse of `sections_of`."""
    return "\n".join(
        f"<!-- section {name} {section.order[0]}.{section.order[1]} -->\n{section.text}\n"
        for name, section in sorted(sections.items())
    )


def write_comment(client: Client, number: int, run: Run, card: Card, *, bot_id: int) -> str:
    """Put a run's section into the comment of its pull request; returns what was done, in words."""
    marker = Marker("card", req=str(number))
    text = pr_comment.render(card, limit=COMMENT_LIMIT // 2 - 500)
    known = {workflow_of(run): Section((run.id, run.attempt), text.strip("\n"))}
    looked = False

    def choose(found: Sequence[Standing]) -> str:
        nonlocal known, looked
        seen = [sections_of(item.body) for item in found]
        # The first time ours replaces an equal one; afterwards what stands is as good, so that two writers do rest.
        known = newest(*seen, known) if looked else newest(known, *seen)
        looked = True
        return f"{marker.line()}\n{join_sections(known)}"

    settled = settle(client, number, choose, bot_id=bot_id, kind="card", req=str(number))
    return f"comment {settled.comment_id}: {settled.done}"
