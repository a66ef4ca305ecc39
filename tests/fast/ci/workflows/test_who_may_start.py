"""The page's table of who may start code of a pull request, and where, has the lanes that the files have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_ci.workflows.model import Workflow

PAGE = (Path(__file__).resolve().parents[4] / "docs/ci/workflows.md").read_text()
HEADING = "## Who may start code of a pull request, and where"
MACHINES = {"_run-ci.yml": 2, "_run-ci-rocm.yml": 3, "_run-cpu-ci.yml": 4}  # file -> column of the table
NOBODY = ("–", "never")


def table() -> list[list[str]]:
    section = PAGE.split(f"{HEADING}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert [cell.rsplit(": ", 1)[-1] for cell in rows[0][2:]] == ["CUDA", "ROCm", "CPU"]
    return rows[2:]


def rows_of(file: str) -> list[list[str]]:
    return [row for row in table() if f"`{file}`" in row[0]]


def called(workflows: Mapping[str, Workflow], file: str) -> set[str]:
    """Every file of ours that a file calls, also through others."""
    direct = {str(job.uses).rsplit("/", 1)[-1] for job in workflows[file].jobs.values() if job.uses}
    return direct.union(*(called(workflows, name) for name in direct))


def test_each_lane_says_who_may_start_code_on_the_machines_that_its_file_reaches(
    workflows: Mapping[str, Workflow],
) -> None:
    starting = {name for name, workflow in workflows.items() if set(workflow.on) - {"workflow_call"}}
    for name in starting:
        reached = {column for file, column in MACHINES.items() if file in called(workflows, name)}
        rows = rows_of(name)
        assert bool(rows) or not reached, name
        for row in rows:
            for column in MACHINES.values():
                assert (row[column] not in NOBODY) is (column in reached), (row[0], column)
    named = set(re.findall(r"`([a-z_-]+\.yml)`", " ".join(row[0] for row in table())))
    assert named <= starting


@pytest.mark.parametrize(
    ("file", "event", "lane"),
    [
        ("pr-test.yml", "pull_request", "fork"), ("pr-test.yml", "pull_request", "branch of this repository"), ("pr-test.yml", "merge_group", "merge queue"),
        ("pr-test.yml", "workflow_dispatch", "dispatch"), ("pr-test-rocm.yml", "pull_request_target", "fork"),
        ("pr-test-rocm.yml", "pull_request_target", "branch of this repository"),
    ],
)  # fmt: skip
def test_each_event_that_brings_code_has_its_lane(
    workflows: Mapping[str, Workflow], file: str, event: str, lane: str
) -> None:
    assert (event in workflows[file].on) is any(lane in row[0] for row in rows_of(file))


def test_a_forks_lanes_ask_for_an_approval_of_the_commit_and_githubs_own_setting_is_stated() -> None:
    for file, column in (("pr-test.yml", 2), ("pr-test-rocm.yml", 3)):
        (row,) = [row for row in rows_of(file) if "fork" in row[0]]
        assert row[column].startswith("commit approved")
    assert "**Require approval for all external contributors**" in PAGE
    assert "GitHub's own approval" in next(row for row in rows_of("pr-test.yml") if "fork" in row[0])[1]
