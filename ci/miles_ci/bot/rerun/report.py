"""Last job of a rerun (and the sweeper): the true result, written once into the one comment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from miles_ci.bot.access import read_pull
from miles_ci.bot.github import CHECK_LIMIT, Client, GitHubError, clip
from miles_ci.bot.marker import Marker
from miles_ci.bot.rerun.comment import Row, final_body
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.state import write_state
from miles_ci.bot.rerun.verdict import RerunVerdict, verdict
from miles_ci.bot.runs import JobInfo, artifact_files, jobs_of, leg_of
from miles_ci.report.untrusted import BadArtifact, SeenShard, read_shard

ARTIFACTS = re.compile(r"results-rerun-[a-z0-9-]{1,64}")


@dataclass(frozen=True)
class Finding:
    """What a run really did."""

    verdict: RerunVerdict
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def collect(
    client: Client, run_id: int, attempt: int, resolve_result: str, planned: Mapping[str, str] | None
) -> Finding:
    """Judge a run from its jobs and the results they uploaded.

    `planned` suite -> hardware as resolve published it; None (the sweeper) takes the suites of the jobs.
    """
    jobs = jobs_of(client, run_id, attempt)
    notes: list[str] = []
    shards = _shards(client, run_id, notes)
    suites = dict(planned) if planned is not None else {suite: "" for job in jobs if (suite := _suite_of(job))}
    legs: dict[str, str] = {}
    rows: list[Row] = []
    for suite, hardware in sorted(suites.items()):
        leg = next((job for job in jobs if leg_of(job, suite)), None)
        seen = [shard for shard in shards if shard.suite == suite]
        if leg is not None:
            legs[suite] = leg.result
        failing = tuple(name for shard in seen for name in _failing(shard))
        rows.append(
            Row(
                suite,
                hardware or (seen[0].hardware if seen else "unknown"),
                legs.get(suite, "skipped"),
                leg.seconds if leg else None,
                leg.url if leg else "",
                sum(shard.observed for shard in seen),
                failing,
            )
        )
    stray = {suite for job in jobs if (suite := _suite_of(job)) and suite not in suites and job.result != "skipped"}
    legs |= dict.fromkeys(stray, "success")
    judged = verdict(resolve_result, dict.fromkeys(suites, 1), legs, {row.suite: row.observed for row in rows})
    return Finding(judged, tuple(rows), tuple(notes))


def _suite_of(job: JobInfo) -> str:
    """The suite of an execution leg: both halves of `<suite> / <suite>` agree."""
    caller, _, inner = job.name.partition(" / ")
    return inner if inner and caller == f"rerun {inner}" else ""


def _shards(client: Client, run_id: int, notes: list[str]) -> list[SeenShard]:
    found = []
    try:
        for file in artifact_files(client, run_id, ARTIFACTS, "results.json"):
            try:
                found.append(read_shard(file.data, f"{file.artifact}"))
            except BadArtifact as error:
                notes.append(f"results ignored: {error}")
    except GitHubError as error:
        notes.append(f"results not read: {error}")
    return found


def _failing(shard: SeenShard) -> list[str]:
    names = []
    for test in shard.tests:
        if test.blocks:
            names += [failure.node for failure in test.failures] or [f"{test.path} ({test.outcome})"]
    return names


def report(
    client: Client,
    request: Request,
    finding: Finding,
    *,
    run_id: int,
    attempt: int,
    run_url: str,
    comment_id: int,
    check_id: int,
    bot_id: int,
    state: str | None = None,
) -> str:
    """Write the terminal state; returns what was done, in words. Repeating it changes nothing.

    What stands wins over us when it is of a newer attempt or final (see `state`); a deleted comment is replaced by one
    terminal comment. The check run gets the state that stands, unless a newer attempt has it.
    """
    judged = finding.verdict if state is None else RerunVerdict(state, finding.verdict.reason)
    superseded = _superseded(client, request)
    body = final_body(
        request, run_id, attempt, run_url, judged, list(finding.rows), superseded=superseded, notes=finding.notes
    )
    marker = Marker("rerun", request.request_id, run_id, attempt, judged.state, request.head_sha)
    written = write_state(client, request, marker, body, bot_id=bot_id, comment_id=comment_id)
    stands = written.standing
    if (stands.run, stands.attempt) != (run_id, attempt):
        return written.done
    final = judged if stands.state == judged.state else RerunVerdict(stands.state)
    note = _finish_check(client, check_id, final, body if final is judged else "See the comment.")
    return f"{written.done}{'; ' + note if note else ''}"


def _superseded(client: Client, request: Request) -> bool:
    try:
        return read_pull(client, request.pull_number).head_sha != request.head_sha
    except GitHubError:
        return False


_CONCLUSION = {"passed": "success", "failed": "failure", "cancelled": "cancelled", "lost": "cancelled"}


def _finish_check(client: Client, check_id: int, judged: RerunVerdict, body: str) -> str:
    if check_id <= 0:
        return ""
    summary = clip(body.split("\n", 1)[-1], CHECK_LIMIT)
    title = f"{judged.state}{': ' + judged.reason if judged.reason else ''}"
    update = {
        "status": "completed",
        "conclusion": _CONCLUSION[judged.state],
        "output": {"title": title, "summary": summary},
    }
    try:
        client.patch(f"{{repo}}/check-runs/{check_id}", update)
    except GitHubError as error:
        if error.status in (403, 404, 422):
            return f"check run not updated: GitHub answered {error.status}"
        raise
    return ""
