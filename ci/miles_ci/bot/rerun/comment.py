"""The text of the rerun comment: rows of registrations, failing tests, links. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from miles_ci.bot.github import COMMENT_LIMIT
from miles_ci.bot.marker import Marker
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.verdict import RerunVerdict
from miles_ci.report.escape import code, markdown

MAX_FAILING = 10


@dataclass(frozen=True)
class Row:
    """One registration. `seconds` None: unknown."""

    suite: str
    hardware: str
    result: str
    seconds: float | None
    url: str
    observed: int
    failing: tuple[str, ...] = ()


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "duration unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def running_body(request: Request, run_id: int, attempt: int, run_url: str) -> str:
    marker = Marker("rerun", request.request_id, run_id, attempt, "running", request.head_sha)
    lines = [
        marker.line(),
        f"**Rerun of** {code(request.target)} at {code(request.head_sha[:12])}: running, see [the run]({run_url}).",
        "",
        f"Asked by {markdown(request.requester, 60)}. This comment is edited when the run ends.",
    ]
    return "\n".join(lines)


def final_body(
    request: Request,
    run_id: int,
    attempt: int,
    run_url: str,
    verdict: RerunVerdict,
    rows: list[Row],
    *,
    superseded: bool = False,
    notes: tuple[str, ...] = (),
) -> str:
    """The terminal comment, never longer than GitHub allows; the marker always stays whole."""
    marker = Marker("rerun", request.request_id, run_id, attempt, verdict.state, request.head_sha)
    reason = f" ({verdict.reason})" if verdict.reason else ""
    of = f" for superseded {code(request.head_sha[:12])}" if superseded else f" at {code(request.head_sha[:12])}"
    lines = [marker.line(), f"**Rerun of** {code(request.target)}{of}: **{verdict.state}**{reason}, [run]({run_url})."]
    if rows:
        lines += ["", "| suite | hardware | result | duration | tests | job |", "|---|---|---|---|---|---|"]
        for row in rows:
            link = f"[log]({row.url})" if row.url else "no job"
            lines.append(
                f"| {code(row.suite)} | {markdown(row.hardware, 40)} | {row.result} | {duration(row.seconds)} | {row.observed} | {link} |"
            )
    for row in rows:
        if row.failing:
            lines += ["", f"Failing in {code(row.suite)} ({len(row.failing)}):"]
            lines += [f"- {code(name, 300)}" for name in row.failing[:MAX_FAILING]]
            if len(row.failing) > MAX_FAILING:
                lines.append(f"- … and {len(row.failing) - MAX_FAILING} more")
    lines += [f"\n_{markdown(note, 300)}_" for note in notes]
    return fit(lines)


def fit(lines: list[str], limit: int = COMMENT_LIMIT) -> str:
    """Join, dropping trailing lines when the body would be too long."""
    body = "\n".join(lines)
    if len(body) <= limit:
        return body
    note = "\n\n… (shortened: see the run)"
    kept, size = [lines[0]], len(lines[0]) + len(note)
    for line in lines[1:]:
        if size + len(line) + 1 > limit:
            break
        kept.append(line)
        size += len(line) + 1
    return "\n".join(kept) + note
