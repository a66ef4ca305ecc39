"""Jobs that wait for a machine of ours that will not come, judged by the registry's own pools.

Whatever is not an image of GitHub's (`registry.hosted`) waits for machines of ours, whether or not its labels say
`self-hosted`. Which runners exist and are online only an App may read (`RUNNER_PERMISSION`): no workflow's
GITHUB_TOKEN can. Without it every long wait is reported as unexplained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_ci.bot.github import Client, GitHubError
from miles_ci.bot.runs import JobInfo, jobs_of, to_run
from miles_ci.registry import Fleet
from miles_ci.registry.hosted import is_hosted
from miles_ci.workflows.files.bots import RUNNER_PERMISSION

QUEUED_LIMIT_S = 60 * 60


@dataclass(frozen=True)
class Pool:
    """Machines that carry the same labels: a pool of the registry, or the `runs_on` of CPU suites."""

    name: str
    labels: frozenset[str]
    off: str = ""


def pools_of(fleet: Fleet) -> list[Pool]:
    found = [
        Pool(f"pool {name}", _folded(pool.labels), pool.disabled.reason if pool.disabled is not None else "")
        for name, pool in fleet.pools.items()
    ]
    for name, suite in fleet.suites.items():
        if suite.backend == "cpu" and not is_hosted(suite.runs_on):
            found.append(Pool(f"machines of {name}", _folded(suite.runs_on)))
    return found


def starved(client: Client, app: Client | None, fleet: Fleet) -> Iterator[str]:
    """One line for each job that has been queued for more than an hour and that no online runner can take.

    `app`: a client whose token has `RUNNER_PERMISSION`; None when there is no App.
    """
    pools = pools_of(fleet)
    runners: list[Mapping[str, Any]] | str | None = None
    for status in ("queued", "in_progress"):
        for entry in client.pages("{repo}/actions/runs", "workflow_runs", status=status):
            run = to_run(entry)
            for job in jobs_of(client, run.id, run.attempt):
                waited = client.clock() - (job.created_at or client.clock())
                if not _waits_for_ours(job) or waited <= QUEUED_LIMIT_S:
                    continue
                if runners is None:
                    runners = _runners(app)
                why = _why(job.labels, pools, runners)
                if why:
                    yield f"{run.url}: job {job.name} has waited {waited / 60:.0f} min for {', '.join(job.labels)} ({why})"


def _waits_for_ours(job: JobInfo) -> bool:
    # A call of a reusable workflow is listed without labels; what waits are the jobs inside.
    return job.status == "queued" and bool(job.labels) and not is_hosted(job.labels)


def _why(labels: Sequence[str], pools: Sequence[Pool], runners: list[Mapping[str, Any]] | str) -> str:
    """Why nobody comes; empty when an online runner carries the labels and is only busy."""
    wanted = _folded(labels)
    fitting = [] if isinstance(runners, str) else [runner for runner in runners if wanted <= _labels_of(runner)]
    if any(runner.get("status") == "online" for runner in fitting):
        return ""
    serving = [pool for pool in pools if wanted <= pool.labels]
    if not serving:
        return "no pool of registry.yaml has these labels"
    if all(pool.off for pool in serving):
        return f"{serving[0].name} is disabled: {serving[0].off}"
    names = " and ".join(pool.name for pool in serving if not pool.off)
    if isinstance(runners, str):
        return f"{names}; {runners}"
    return f"{names}: none of {len(fitting)} runners is online" if fitting else f"{names}: no runner is registered"


def _runners(app: Client | None) -> list[Mapping[str, Any]] | str:
    """The repository's runners, or why they cannot be read."""
    if app is None:
        return "whether a runner is online is unknown: no App (repository variable MILES_CI_APP_ID)"
    try:
        return list(app.pages("{repo}/actions/runners", "runners"))
    except GitHubError as error:
        if error.status in (403, 404):
            needed = RUNNER_PERMISSION.replace(":", ": ")
            return f"whether a runner is online is unknown: the App's token needs `{needed}` (GitHub answered {error.status})"
        raise


def _labels_of(runner: Mapping[str, Any]) -> frozenset[str]:
    return _folded([str(label["name"]) for label in runner.get("labels") or []])


def _folded(labels: Sequence[str]) -> frozenset[str]:
    # GitHub compares labels without regard to case.
    return frozenset(label.lower() for label in labels)
