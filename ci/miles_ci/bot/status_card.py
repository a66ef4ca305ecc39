"""`status-card.yml`: the finished run -> one report -> pull-request comment, Lark message, job summary.

Artifacts of pull-request runs are untrusted data here. A notification that fails is reported in the summary and
changes no verdict.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from miles_ci.bot.github import Client, GitHubError
from miles_ci.bot.runs import JobInfo, Run, artifact_files, jobs_of
from miles_ci.report.analyse import Report, analyse
from miles_ci.report.analyst import Analyst, Evidence, run_analyst
from miles_ci.report.cards import Card, JobRow, lark
from miles_ci.report.cards.model import default_analyses, weekday_title
from miles_ci.report.strict_json import StrictJsonError, loads
from miles_ci.report.untrusted import BadArtifact, SeenShard, read_shard

MERGED = re.compile(r"merged(-rocm)?")
_LEG = re.compile(r"(?:.* / )?(?P<suite>[a-z0-9-]+) \((?P<shard>\d+/\d+)\) / (?P=suite)")
_CADENCES = {"nightly.yml": "nightly", "weekly.yml": "weekly", "release.yml": "release"}


@dataclass(frozen=True)
class Collected:
    """`report` of everything uploaded; `notes` what could not be read."""

    report: Report
    notes: tuple[str, ...]


def collect(client: Client, run_id: int) -> Collected:
    """Read the merged results of a run."""
    shards: list[SeenShard] = []
    never_executed: list[str] = []
    faults: list[str] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []
    try:
        for file in artifact_files(client, run_id, MERGED, "merged.json"):
            try:
                _add(file.data, shards, never_executed, faults, skipped)
            except (BadArtifact, StrictJsonError) as error:
                notes.append(f"{file.artifact} ignored: {error}")
    except GitHubError as error:
        notes.append(f"results not read: {error}")
    if not shards and not notes:
        notes.append("the run uploaded no results")
    return Collected(analyse(shards, never_executed=never_executed, faults=faults, skipped=skipped), tuple(notes))


def _add(
    data: bytes, shards: list[SeenShard], never_executed: list[str], faults: list[str], skipped: dict[str, str]
) -> None:
    top = loads(data, what="merged.json")
    if not isinstance(top, dict) or not isinstance(top.get("shards"), list) or len(top["shards"]) > 1000:
        raise BadArtifact("merged.json: not the merge of our shards")
    found = [read_shard(entry, f"merged.json: shards[{at}]") for at, entry in enumerate(top["shards"])]
    for name, target in (("never_executed", never_executed), ("faults", faults)):
        values = top.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise BadArtifact(f"merged.json: {name} is not a list of texts")
        target.extend(value[:300] for value in values[:1000])
    reasons = top.get("skipped_suites", {})
    if not isinstance(reasons, dict) or not all(isinstance(value, str) for value in reasons.values()):
        raise BadArtifact("merged.json: skipped_suites is not an object of texts")
    skipped.update({str(name)[:64]: value[:300] for name, value in list(reasons.items())[:200]})
    shards.extend(found)


def rows(jobs: list[JobInfo], report: Report, analyst: Analyst | None = None) -> tuple[tuple[JobRow, ...], str]:
    """One row for each job with its failing tests; the second value says why the analyst was not used."""
    out = []
    for job in jobs:
        leg = _LEG.fullmatch(job.name)
        analyses = default_analyses(report, leg["suite"], leg["shard"]) if leg else ()
        out.append(JobRow(job.name.split(" / ")[-2] if " / " in job.name else job.name, job.url, job.result, analyses))
    if analyst is None:
        return tuple(out), ""
    tests = {row.name: [item.test_name or "" for item in row.analyses] for row in out if row.analyses}
    logs = {f"{test.suite}:{test.node}": test.message for test in report.failed}
    claims, why = run_analyst(analyst, Evidence(tests, logs, {}))
    if why:
        return tuple(out), why
    signatures = {(row.name, item.test_name): item.signature for row in out for item in row.analyses}
    by_job: dict[str, list[Any]] = {}
    for claim in claims:
        signature = signatures.get((claim.job_id, claim.test_name), "")
        by_job.setdefault(claim.job_id, []).append(replace(claim, signature=signature))
    return tuple(JobRow(row.name, row.url, row.result, tuple(by_job.get(row.name, row.analyses))) for row in out), ""


def make_card(client: Client, run: Run, *, now: float, analyst: Analyst | None = None) -> Card:
    """The card of a finished run."""
    collected = collect(client, run.id)
    jobs, why = rows(jobs_of(client, run.id, run.attempt), collected.report, analyst)
    file = run.path.split("@")[0].rsplit("/", 1)[-1]
    cadence = _CADENCES.get(file, "regular")
    when = datetime.fromtimestamp(run.created_at or now, timezone.utc)
    if cadence == "nightly" and lark.is_weekly(when):
        cadence = "weekly"
    workflow = str(run.raw.get("name") or file)
    result = {"success": "success", "cancelled": "cancelled"}.get(run.conclusion or "", "failure")
    title = f"{weekday_title(cadence, workflow)}: {result}"
    notes = collected.notes + ((f"no analysis: {why}",) if why else ())
    return Card(
        title,
        cadence,
        when.strftime("%Y-%m-%d %H:%M UTC"),
        run.url,
        result,
        collected.report,
        jobs,
        run.head_sha,
        notes,
    )


def pull_of(client: Client, run: Run) -> int | None:
    """The open pull request whose live head this run tested; None when there is none."""
    titled = re.search(r"\b([0-9a-f]{40})\b", run.title)
    sha = titled[1] if titled and run.raw.get("event") == "workflow_dispatch" else run.head_sha
    if run.raw.get("event") not in ("pull_request", "pull_request_target", "workflow_dispatch"):
        return None
    for pull in client.pages(f"{{repo}}/commits/{sha}/pulls"):
        if pull.get("state") == "open" and pull["head"]["sha"] == sha:
            return int(pull["number"])
    return None


def post_lark(url: str, timeout_s: float = 10.0) -> lark.Post:
    """Send to a webhook; the address is a secret and appears in no message."""
    from miles_ci.bot.transport import Transport, TransportError

    def post(data: bytes) -> tuple[int, bytes]:
        try:
            reply = Transport(timeout_s).send(
                "POST", url, {"content-type": "application/json; charset=utf-8"}, data, limit=65_536
            )
        except TransportError as error:
            raise OSError(type(error.__cause__).__name__) from None
        return reply.status, reply.body

    return post


def send_lark(card: Card, url: str, secret: str | None) -> lark.Delivery:
    return lark.deliver(card, post_lark(url), secret=secret, clock=time.time, sleep=time.sleep)
