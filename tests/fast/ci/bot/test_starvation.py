"""Jobs that wait for a machine that will not come: by the registry's pools, with the permission that this needs."""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles_ci.bot.starvation import QUEUED_LIMIT_S, pools_of
from miles_ci.registry import load_fleet
from miles_ci.workflows.files.bots import RUNNER_PERMISSION
from tests.fast.ci.bot.conftest import ROOT, Job, steps_of
from tests.fast.ci.bot.helpers.github_server import APP_TOKEN, TOKEN, Fault, GitHub, iso
from tests.fast.ci.bot.helpers.permissions import lacking

MI300X = ("self-hosted", "amd", "mi300x", "4gpu")


def waiting(
    hub: GitHub, *labels: str, minutes: float = 120, status: str = "queued", run_status: str = "queued"
) -> None:
    run = hub.run("pr-test-rocm.yml", title="x", status=run_status)
    hub.job(
        run["id"], "stage (1/2) / stage", None, status=status, created_at=iso(time.time() - 60 * minutes),
        labels=list(labels), completed_at=None,
    )  # fmt: skip


def runner(hub: GitHub, *labels: str, status: str = "online", busy: bool = True) -> None:
    names = [{"name": label} for label in labels]
    number = len(hub.runners) + 1
    hub.runners.append(
        {"id": number, "name": f"r{number}", "os": "linux", "status": status, "busy": busy, "labels": names}
    )


def change_registry(checkout: Path, change: Any) -> None:
    registry = yaml.safe_load((checkout / "registry.yaml").read_text())
    change(registry)
    (checkout / "registry.yaml").write_text(yaml.safe_dump(registry, sort_keys=False))


def found(job: Job, **env: str) -> str:
    """The report, empty when nothing starves."""
    code, outputs = job("starvation", **env)
    fine = "Every job that waits has a machine to wait for." in outputs["summary"]
    assert code == (0 if fine else 3)
    return "" if fine else outputs["summary"]


def test_a_pool_without_an_online_runner_is_named_and_one_with_a_busy_runner_is_not(hub: GitHub, job: Job) -> None:
    waiting(hub, *MI300X)
    runner(hub, "self-hosted", "amd", "mi355x", "4gpu")
    text = found(job)
    assert "has waited 120 min for self-hosted, amd, mi300x, 4gpu (pool mi300x-4gpu: no runner is registered)" in text
    runner(hub, *MI300X, status="offline")
    assert "(pool mi300x-4gpu: none of 1 runners is online)" in found(job)
    runner(hub, "Linux", *(label.upper() for label in MI300X))
    assert found(job) == ""


@pytest.mark.parametrize("labels", [("gpu-box",), ("h200", "8gpu"), ("ubuntu-24.04", "large")])
def test_labels_that_do_not_say_self_hosted_starve_too(hub: GitHub, job: Job, labels: tuple[str, ...]) -> None:
    waiting(hub, *labels)
    known = (
        "no pool of registry.yaml has these labels"
        if "h200" not in labels
        else "pool h200-8gpu: no runner is registered"
    )
    assert f"for {', '.join(labels)} ({known})" in found(job)
    runner(hub, *labels)
    assert found(job) == ""


def test_a_cpu_suite_on_machines_of_ours_is_a_pool_as_well(hub: GitHub, job: Job, checkout: Path) -> None:
    change_registry(checkout, lambda registry: registry["suites"]["stage-a-cpu"].update(runs_on=["cpu-pool"]))
    waiting(hub, "cpu-pool")
    assert "(machines of stage-a-cpu: no runner is registered)" in found(job)


def test_a_disabled_pool_says_its_reason(hub: GitHub, job: Job, checkout: Path) -> None:
    off = {
        "reason": "node is being re-imaged",
        "issue": "#123",
        "until": (datetime.date.today() + datetime.timedelta(days=20)).isoformat(),
    }
    change_registry(checkout, lambda registry: registry["pools"]["mi300x-4gpu"].update(disabled=off))
    waiting(hub, *MI300X)
    assert "(pool mi300x-4gpu is disabled: node is being re-imaged)" in found(job)


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        (("ubuntu-24.04",), {}), ((), {}), (MI300X, {"minutes": QUEUED_LIMIT_S / 60 - 1}), (MI300X, {"status": "in_progress"}),
        (MI300X, {"status": "completed"}), (MI300X, {"run_status": "completed"}),
    ],
)  # fmt: skip
def test_what_does_not_wait_for_us_or_not_for_long_is_left_alone(
    hub: GitHub, job: Job, labels: tuple[str, ...], values: dict[str, Any]
) -> None:
    waiting(hub, *labels, **values)
    assert found(job) == ""
    assert not any(seen.path.endswith("/actions/runners") for seen in hub.seen)


def test_one_minute_over_the_limit_counts_also_in_a_run_that_has_begun(hub: GitHub, job: Job) -> None:
    waiting(hub, *MI300X, minutes=QUEUED_LIMIT_S / 60 + 1, run_status="in_progress")
    assert "has waited 61 min" in found(job)


def test_the_runner_list_is_read_once_with_the_apps_token(hub: GitHub, job: Job) -> None:
    for _ in range(3):
        waiting(hub, *MI300X)
    assert found(job).count("no runner is registered") == 3
    assert [seen.token for seen in hub.seen if seen.path.endswith("/actions/runners")] == [APP_TOKEN]
    assert {seen.token for seen in hub.seen if not seen.path.endswith("/actions/runners")} == {TOKEN}


def test_without_the_permission_or_the_app_the_wait_is_still_reported_and_says_what_is_missing(
    hub: GitHub, job: Job
) -> None:
    waiting(hub, *MI300X)
    waiting(hub, "gpu-box")
    hub.faults.append(Fault("GET", "/actions/runners", status=403))
    text = found(job)
    assert (
        "(pool mi300x-4gpu; whether a runner is online is unknown: the App's token needs `administration: read`" in text
    )
    assert "for gpu-box (no pool of registry.yaml has these labels)" in text
    assert "no App (repository variable MILES_CI_APP_ID)" in found(job, APP_TOKEN="")


def test_the_workflow_asks_for_the_permission_and_no_more_and_the_page_states_it() -> None:
    (step,) = steps_of()["starvation"]
    assert step.app_permissions == dict([RUNNER_PERMISSION.split(":")])
    assert lacking("GET", "/actions/runners", step.app_permissions) is None
    assert lacking("GET", "/actions/runners", step.permissions) == "administration: read"
    asked = {f"{k}: {v}" for steps in steps_of().values() for step in steps for k, v in step.app_permissions.items()}
    page = (ROOT / "docs/ci/workflows.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| permissions of the App |"))
    assert set(re.findall(r"`([a-z-]+: [a-z]+)`", row)) == asked


def test_every_pool_of_the_registry_is_known_by_its_labels() -> None:
    fleet = load_fleet(ROOT / "registry.yaml")
    assert {pool.name for pool in pools_of(fleet)} == {f"pool {name}" for name in fleet.pools}
