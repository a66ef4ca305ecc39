"""Triggers and concurrency of every file, as the specification's table has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from miles_ci.workflows.expr import Env, interpolate
from miles_ci.workflows.expr.values import normalise
from miles_ci.workflows.model import Workflow

CANCEL_PR = "${{ github.event_name == 'pull_request' }}"
TABLE: dict[str, tuple[set[str], str, dict[str, Any]]] = {
    "pr-test.yml": (
        {"pull_request", "merge_group", "workflow_dispatch", "workflow_call"},
        "pr-test-",
        {"cancel-in-progress": CANCEL_PR},
    ),
    "pr-test-rocm.yml": (
        {"pull_request_target", "workflow_dispatch", "workflow_call"},
        "pr-test-rocm-",
        {"cancel-in-progress": CANCEL_PR.replace("request'", "request_target'")},
    ),
    "_run-cpu-ci.yml": ({"workflow_call"}, "", {}),
    "_run-ci.yml": ({"workflow_call"}, "", {}),
    "_run-ci-rocm.yml": ({"workflow_call"}, "", {}),
    "nightly.yml": ({"schedule", "workflow_dispatch"}, "nightly", {"cancel-in-progress": False}),
    "weekly.yml": ({"schedule", "workflow_dispatch"}, "weekly", {"cancel-in-progress": False}),
    "release.yml": ({"push", "workflow_dispatch"}, "release-", {"cancel-in-progress": True}),
    "rerun-test.yml": ({"workflow_dispatch"}, "rerun-", {"queue": "max"}),
    "comment-gateway.yml": ({"issue_comment"}, "comment-", {"queue": "max"}),
    "approve-trusted.yml": ({"pull_request_target"}, "approve-", {"queue": "max"}),
    "docker-build.yml": ({"push", "workflow_dispatch", "workflow_call"}, "image-", {"cancel-in-progress": False}),
    "registry-scan.yml": ({"push", "merge_group"}, "registry-scan-", {}),
    "status-sweeper.yml": ({"schedule", "workflow_dispatch"}, "status-sweeper", {}),
    "status-card.yml": ({"workflow_run"}, "status-card-", {}),
    "lint-patch.yml": ({"workflow_dispatch"}, "lint-", {"queue": "max"}),
}


def test_every_file_is_in_the_table_and_agrees_with_it(workflows: Mapping[str, Workflow]) -> None:
    assert set(TABLE) == set(workflows)
    for name, (triggers, prefix, rest) in TABLE.items():
        concurrency = dict(workflows[name].raw.get("concurrency") or {})
        group = concurrency.pop("group", "")
        assert set(workflows[name].on) == triggers, name
        assert group.startswith(prefix), name
        assert bool(group) == bool(prefix), name
        assert concurrency == rest, name


def test_crons_are_those_of_the_registry(workflows: Mapping[str, Workflow]) -> None:
    assert [entry["cron"] for entry in workflows["nightly.yml"].on["schedule"]] == ["0 15 * * 0-5"]
    assert [entry["cron"] for entry in workflows["weekly.yml"].on["schedule"]] == ["0 15 * * 6"]


def group(
    workflow: Workflow, event: dict[str, Any], inputs: dict[str, Any], name: str = "pull_request", run: str = "7"
) -> str:
    env = Env({"github": normalise({"event": event, "event_name": name, "run_id": run}), "inputs": normalise(inputs)})
    return str(interpolate(workflow.raw["concurrency"]["group"], env))


def test_runs_of_one_pull_request_share_a_group_and_others_do_not(workflows: Mapping[str, Workflow]) -> None:
    pr = workflows["pr-test.yml"]
    assert group(pr, {"pull_request": {"number": 5}}, {}) == "pr-test-5"
    assert group(pr, {}, {"ref": "abc", "cadence": "nightly"}, "schedule") == "pr-test-abc-nightly"
    assert group(pr, {}, {}, "merge_group", "9") == "pr-test-9"
    rocm = workflows["pr-test-rocm.yml"]
    assert (
        group(rocm, {}, {"pull_number": "5"}, "workflow_dispatch")
        == group(rocm, {"pull_request": {"number": 5}}, {})
        == "pr-test-rocm-5"
    )


@pytest.mark.parametrize(("name", "cancels"), [("pull_request", True), ("merge_group", False), ("schedule", False)])
def test_only_a_pull_request_cancels_its_own_older_run(
    workflows: Mapping[str, Workflow], name: str, cancels: bool
) -> None:
    raw = workflows["pr-test.yml"].raw["concurrency"]["cancel-in-progress"]
    assert interpolate(raw, Env({"github": {"event_name": name}})) is cancels


def test_comments_of_one_pull_request_wait_in_order_and_none_is_dropped(workflows: Mapping[str, Workflow]) -> None:
    rule = workflows["comment-gateway.yml"].raw["concurrency"]
    assert "issue.number" in rule["group"]
    assert (rule["queue"], rule.get("cancel-in-progress", False)) == ("max", False)
