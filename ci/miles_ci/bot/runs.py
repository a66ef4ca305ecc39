"""Workflow runs: dispatch one and find it again, its jobs, its artifacts as untrusted data."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miles_ci.bot.access import timestamp
from miles_ci.bot.github import Client, GitHubError, quoted
from miles_ci.errors import CiError, ExitCode

FIND_LIMIT_S = 60.0
FIND_PAUSE_S = 3.0
MAX_ARTIFACT = 20 * 1024 * 1024


class DispatchLost(CiError):
    """GitHub took the request and no run appeared."""

    exit_code = ExitCode.INFRA


@dataclass(frozen=True)
class Run:
    """`url` is for people. `attempt` counts from 1."""

    id: int
    url: str
    attempt: int
    title: str
    status: str
    conclusion: str | None
    path: str
    head_sha: str
    created_at: float | None
    started_at: float | None
    raw: Mapping[str, Any]


def to_run(data: Mapping[str, Any]) -> Run:
    return Run(
        id=data["id"],
        url=data.get("html_url") or "",
        attempt=data.get("run_attempt") or 1,
        title=data.get("display_title") or "",
        status=data.get("status") or "",
        conclusion=data.get("conclusion"),
        path=data.get("path") or "",
        head_sha=data.get("head_sha") or "",
        created_at=timestamp(data.get("created_at")),
        started_at=timestamp(data.get("run_started_at")),
        raw=data,
    )


def read_run(client: Client, run_id: int) -> Run:
    return to_run(client.get(f"{{repo}}/actions/runs/{run_id}"))


def find_by_request(client: Client, workflow: str, request_id: str) -> Run | None:
    """The run whose name carries the request id. Looks at the newest 100 dispatched runs."""
    data = client.get(f"{{repo}}/actions/workflows/{quoted(workflow)}/runs", event="workflow_dispatch", per_page=100)
    for entry in data["workflow_runs"]:
        if f"[{request_id}]" in (entry.get("display_title") or ""):
            return to_run(entry)
    return None


def dispatch(client: Client, workflow: str, ref: str, inputs: Mapping[str, str], request_id: str) -> Run:
    """Start a run once and prove that it exists.

    A lost answer is followed by a search for the request id before anything is sent again. Raises
    `DispatchLost` when no run appears within 60 s.
    """
    found: list[Run] = []

    def proof() -> Run | None:
        run = find_by_request(client, workflow, request_id)
        if run is not None:
            found.append(run)
        return run

    body = {"ref": ref, "inputs": dict(inputs), "return_run_details": True}
    answer = client.post(f"{{repo}}/actions/workflows/{quoted(workflow)}/dispatches", body, proof=proof)
    if found:
        return found[-1]
    if isinstance(answer, Mapping) and type(answer.get("workflow_run_id")) is int:
        try:
            run = read_run(client, answer["workflow_run_id"])
        except GitHubError as error:
            if error.status != 404:
                raise
        else:
            if f"[{request_id}]" in run.title and run.path.split("@")[0].endswith(f"/{workflow}"):
                return run
    deadline = client.clock() + FIND_LIMIT_S
    while True:
        run_found = find_by_request(client, workflow, request_id)
        if run_found is not None:
            return run_found
        if client.clock() + FIND_PAUSE_S > deadline:
            raise DispatchLost(
                f"{workflow}: the request was accepted, but no run with id {request_id} appeared in 60 s"
            )
        client.sleep(FIND_PAUSE_S)


@dataclass(frozen=True)
class JobInfo:
    """One job of a run. `seconds` is None when a time is missing, malformed or negative."""

    id: int
    name: str
    status: str
    conclusion: str | None
    url: str
    seconds: float | None
    labels: tuple[str, ...] = ()
    created_at: float | None = None

    @property
    def result(self) -> str:
        """The conclusion in the words of `needs`; a job that did not end is cancelled."""
        words = {
            "timed_out": "failure",
            "startup_failure": "failure",
            "action_required": "failure",
            "neutral": "success",
            "stale": "cancelled",
        }
        if self.status != "completed" or self.conclusion is None:
            return "cancelled"
        return words.get(self.conclusion, self.conclusion)


def jobs_of(client: Client, run_id: int, attempt: int) -> list[JobInfo]:
    path = f"{{repo}}/actions/runs/{run_id}/attempts/{attempt}/jobs"
    return [_job(entry) for entry in client.pages(path, "jobs")]


def _job(entry: Mapping[str, Any]) -> JobInfo:
    start, end = timestamp(entry.get("started_at")), timestamp(entry.get("completed_at"))
    seconds = end - start if start is not None and end is not None and end >= start else None
    labels = tuple(str(label) for label in entry.get("labels") or [])
    created = timestamp(entry.get("created_at"))
    url = entry.get("html_url") or ""
    return JobInfo(
        entry["id"], entry["name"], entry.get("status") or "", entry.get("conclusion"), url, seconds, labels, created
    )


def leg_of(job: JobInfo, suite: str) -> bool:
    """Whether a job is the execution of a suite: `<caller> / <suite>`, as the reusable workflows name it."""
    return job.name == suite or job.name.endswith(f"/ {suite}")


@dataclass(frozen=True)
class ArtifactFile:
    """One member of an artifact. `name` is for messages only; nothing is written under it."""

    artifact: str
    name: str
    data: bytes


def artifact_files(client: Client, run_id: int, wanted: re.Pattern[str], member: str) -> Iterator[ArtifactFile]:
    """Members whose base name is `member` in artifacts whose name matches, read in memory.

    Artifacts of pull requests are untrusted: at most 20 MiB compressed and unpacked, no path is used.
    Larger or damaged ones raise `GitHubError` naming the artifact.
    """
    for entry in client.pages(f"{{repo}}/actions/runs/{run_id}/artifacts", "artifacts"):
        name = str(entry.get("name"))
        if not wanted.fullmatch(name) or entry.get("expired"):
            continue
        if int(entry.get("size_in_bytes") or 0) > MAX_ARTIFACT:
            raise GitHubError(f"artifact {name}: larger than {MAX_ARTIFACT} bytes")
        reply = client.download(f"{{repo}}/actions/artifacts/{entry['id']}/zip", limit=MAX_ARTIFACT)
        if reply.truncated:
            raise GitHubError(f"artifact {name}: larger than {MAX_ARTIFACT} bytes")
        yield from _members(name, reply.body, member)


def _members(artifact: str, data: bytes, member: str) -> Iterator[ArtifactFile]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            left = MAX_ARTIFACT
            for info in archive.infolist():
                if info.is_dir() or info.filename.replace("\\", "/").rsplit("/", 1)[-1] != member:
                    continue
                with archive.open(info) as stream:  # the declared size is not believed
                    content = stream.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise GitHubError(f"artifact {artifact}: unpacks to more than {MAX_ARTIFACT} bytes")
                yield ArtifactFile(artifact, info.filename, content)
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, EOFError) as error:
        raise GitHubError(f"artifact {artifact}: not a readable archive: {error}") from error
