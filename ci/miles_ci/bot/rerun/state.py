"""Which state of a rerun stands, when announcement, report, sweeper, older and newer attempts write it at once.

Compare and set on (attempt, state): a newer attempt replaces an older one, never the reverse; within an attempt a
terminal state is final. Only writers that raced, having compared before the others wrote, are ranked: a true result
comes before `lost`, and that before `running`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_ci.bot.github import Client
from miles_ci.bot.marker import Marker
from miles_ci.bot.one_comment import Standing, settle
from miles_ci.bot.rerun.request import Request

TERMINAL = ("passed", "failed", "cancelled", "lost")
_RANK = {"running": 0, "lost": 1, "passed": 2, "failed": 2, "cancelled": 2}


@dataclass(frozen=True)
class Written:
    """`standing`: what the comment says now, which is ours or was there before us; `done` is for the log."""

    comment_id: int
    standing: Marker
    done: str


def rank(marker: Marker) -> tuple[int, int, int]:
    """Which of two markers is right when both were written at once."""
    return marker.run, marker.attempt, _RANK.get(marker.state, -1)


def may_write(new: Marker, standing: Marker) -> bool:
    """Whether a state may follow the one that stands."""
    if (new.run, new.attempt) != (standing.run, standing.attempt):
        return (new.run, new.attempt) > (standing.run, standing.attempt)
    return standing.state not in TERMINAL


def write_state(
    client: Client, request: Request, marker: Marker, body: str, *, bot_id: int, comment_id: int = 0
) -> Written:
    """Bring the comment of a request to `marker`, unless what stands is newer or final. Safe to repeat."""
    chosen = Standing(0, marker, body)
    refused = ""
    looked = False

    def choose(found: Sequence[Standing]) -> str:
        nonlocal chosen, refused, looked
        best = max(found, key=lambda item: rank(item.marker), default=None)
        if best is not None and not looked and not may_write(marker, best.marker):
            chosen = best
            newer = (best.marker.run, best.marker.attempt) != (marker.run, marker.attempt)
            refused = "silent: a newer attempt writes this comment" if newer else "unchanged: its state is final"
        elif best is not None and looked and rank(best.marker) >= rank(chosen.marker):
            chosen = best
        looked = True
        return chosen.body

    settled = settle(
        client, request.pull_number, choose, bot_id=bot_id, kind="rerun", req=request.request_id, comment_id=comment_id
    )
    return Written(settled.comment_id, chosen.marker, refused or settled.done)
