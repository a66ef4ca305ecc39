"""The steps of the ROCm job, executed by bash with stub tools: order, environment, what happens after a failure.

Nobody here has an MI300X. What can be pinned is what the runner would do: which commands, with which arguments, in
which order, and that the workspace is cleaned and results are uploaded whatever happened.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_ci.workflows.expr import Env, interpolate, is_truthy
from miles_ci.workflows.expr.values import normalise
from miles_ci.workflows.model import Job, Workflow

INPUTS = {
    "artifact": "stage-c-4-gpu-mi300x-1", "file": "", "image": "ghcr.io/x@sha256:0", "node": "", "plan": "plan-rocm", "plan_digest": "d" * 64,
    "ref": "a" * 40, "runs_on": "[]", "dependency_commits": '{"engine":"bb"}', "shard": "1/2", "suite": "stage-c-4-gpu-mi300x", "timeout_minutes": 110,
}  # fmt: skip
STUB = """#!/bin/bash
echo "$(basename "$0") $* | COMMITS=${DEPENDENCY_COMMITS:-} PLAN=${MILES_CI_PLAN:-} DIGEST=${MILES_CI_PLAN_DIGEST:-}" >> "$STUB_LOG"
if [[ -n "${STUB_FAIL:-}" && "$*" == *"$STUB_FAIL"* ]]; then exit 3; fi
"""


def run_steps(job: Job, tmp_path: Path, inputs: Mapping[str, Any], *, fail: str = "") -> tuple[str, list[str]]:
    """Execute the steps as the runner does (default `success()`), `uses:` steps by name; returns result and log."""
    stubs, log = tmp_path / "bin", tmp_path / "log"
    stubs.mkdir()
    for name in ("python", "find"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    failed = False
    for step in job.steps:
        values_of = {"success": not failed, "always": True, "failure": failed, "cancelled": False}
        status = {name: (lambda value=value: value) for name, value in values_of.items()}
        env = Env({"inputs": normalise(dict(inputs)), "github": {}}, status)
        condition = step.get("if", "success()")
        text = condition if any(word in condition for word in status) else f"success() && ({condition})"
        if not is_truthy(interpolate(f"${{{{ {text} }}}}", env)):
            continue
        if "uses" in step:
            with log.open("a") as file:
                file.write(f"uses {step['name']}\n")
            continue
        values = {name: str(interpolate(value, env)) for name, value in (step.get("env") or {}).items()}
        base = {
            "PATH": f"{stubs}:/usr/bin:/bin",
            "STUB_LOG": str(log),
            "STUB_FAIL": fail,
            "GITHUB_WORKSPACE": str(tmp_path / "work"),
            "HOME": os.environ.get("HOME", "/"),
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]],
            env=base | values,
            cwd=tmp_path,
            check=False,
        )
        failed = failed or done.returncode != 0
    return ("failure" if failed else "success"), log.read_text().splitlines()


@pytest.fixture
def rocm(workflows: Mapping[str, Workflow]) -> Job:
    return workflows["_run-ci-rocm.yml"].jobs["run"]


def test_a_shard_runs_its_commands_in_order_with_the_verified_plan(rocm: Job, tmp_path: Path) -> None:
    result, log = run_steps(rocm, tmp_path, INPUTS)
    assert result == "success"
    words = [line.split(" | ")[0] for line in log]
    assert words == [
        f"find {tmp_path / 'work'} -mindepth 1 -delete",
        "uses Check out",
        "uses Download into plan",
        *(f"python -m miles_ci images dependencies {verb}" for verb in ("checkout", "check", "apply", "install")),
        "python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .",
        "python -m miles_ci run --suite stage-c-4-gpu-mi300x --shard 1/2 --results results",
        "uses Upload results",
        f"find {tmp_path / 'work'} -mindepth 1 -delete",
    ]
    assert 'COMMITS={"engine":"bb"}' in log[3]
    assert log[8].endswith(f"PLAN=plan/plan.json DIGEST={'d' * 64}")


def test_a_file_needs_no_plan_and_a_node_is_part_of_its_target(rocm: Job, tmp_path: Path) -> None:
    inputs = INPUTS | {"file": "tests/rocm/test_amd_x.py", "node": "TestA::test_b[1-2]", "shard": "", "plan_digest": ""}
    _, log = run_steps(rocm, tmp_path, inputs)
    assert "uses Download into plan" not in log
    assert any(
        "run --suite stage-c-4-gpu-mi300x --file tests/rocm/test_amd_x.py::TestA::test_b[1-2] --results results" in line
        for line in log
    )
    assert log[-3].endswith("PLAN= DIGEST=")


@pytest.mark.parametrize("fail", ["dependencies check", "ci run"])
def test_after_a_failure_nothing_more_is_tested_but_results_are_uploaded_and_the_workspace_is_cleaned(
    rocm: Job, tmp_path: Path, fail: str
) -> None:
    result, log = run_steps(rocm, tmp_path, INPUTS, fail=fail)
    assert result == "failure"
    assert any("dependencies apply" in line for line in log) is (fail == "ci run")
    assert log[-2] == "uses Upload results"
    assert log[-1].startswith("find ")


def test_a_value_of_a_stranger_stays_one_argument(rocm: Job, tmp_path: Path) -> None:
    evil = '"; touch pwned; echo "$(touch pwned2)'
    run_steps(rocm, tmp_path, INPUTS | {"suite": evil, "shard": "`touch pwned3`"})
    assert not list(tmp_path.glob("pwned*"))
