"""The harness away from Linux: everything but the runner works without the modules that Unix alone has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci
from miles_ci.errors import UsageError
from miles_ci.run import system
from tests.fast.ci.helpers.lean import LEAN_PYTEST
from tests.fast.ci.helpers.trees import REPOSITORY

register_cpu_ci(15, "stage-a-cpu")

# A Python as another system has it: its name, no Unix modules, none of the calls that only Linux or Unix have.
OTHERS = "asyncio, pathlib, pydantic, shutil, sqlite3, subprocess, sysconfig, tempfile, yaml, zoneinfo"
ELSEWHERE = """
import os, sys
sys.platform = {platform!r}
for name in ("fcntl", "grp", "pwd", "resource", "termios", "pty"):
    sys.modules[name] = None
for name in ("fork", "setsid", "killpg", "getuid", "geteuid", "pipe2", "pread", "pwrite", "sched_getaffinity",
             "memfd_create", "pidfd_open", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK"):
    if hasattr(os, name):
        delattr(os, name)
from miles_ci.cli import main
sys.exit(main({words!r}))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("elsewhere")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "tests/fast").mkdir(parents=True)
    (root / "tests/fast/test_add.py").write_text(
        "from miles_ci.declare import register_cpu_ci\n\nregister_cpu_ci(1, 'stage-a-cpu')\n\n\n"
        "def test_add():\n    assert 1 + 2 == 3\n"
    )
    return root


def call(root: Path, *words: str, platform: str = "win32") -> subprocess.CompletedProcess[str]:
    # What is not ours reads the name of the system when it is imported, and finds Linux: git still runs.
    code = f"import {OTHERS}\nsysconfig.get_config_vars()\n" + ELSEWHERE.format(platform=platform, words=list(words))
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY / "ci"), **LEAN_PYTEST}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_planning_linting_generating_and_reporting_need_no_linux(project: Path, platform: str) -> None:
    (project / "registry.yaml").unlink(missing_ok=True)
    for words in (
        ("init",),
        ("lint",),
        ("list",),
        ("plan", "--suite", "stage-a-cpu"),
        ("explain", "tests/fast/test_add.py"),
        ("generate",),
        ("generate", "--check"),
        ("tune", "--report"),
        ("doctor",),
    ):
        done = call(project, *words, platform=platform)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"


def test_results_made_on_linux_are_reported_elsewhere(project: Path, tmp_path: Path) -> None:
    if not (project / "registry.yaml").exists():
        assert call(project, "init").returncode == 0
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY / "ci"), **LEAN_PYTEST}
    words = ["-m", "miles_ci", "run", "--suite", "stage-a-cpu", "--results", str(tmp_path / "results")]
    ran = subprocess.run([sys.executable, *words], cwd=project, env=env, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made = call(project, "plan", "--format", "json", "--suite", "stage-a-cpu")
    (tmp_path / "plan.json").write_text(made.stdout)
    shown = call(project, "results", "show", str(tmp_path / "results"))
    assert "1 passed" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_what_the_runner_needs_is_refused_by_name(project: Path, platform: str) -> None:
    if not (project / "registry.yaml").exists():
        assert call(project, "init").returncode == 0
    done = call(project, "run", "--suite", "stage-a-cpu", platform=platform)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"run: the runner needs Linux (/proc, prctl, flock), and this system is {platform}; run the")
    seen = json.loads(call(project, "doctor", "--format", "json", platform=platform).stdout)
    assert {(suite["runs"], suite["reason"]) for suite in seen["suites"]} == {
        (False, f"the runner needs Linux (/proc, prctl, flock), and this system is {platform}")
    }


def test_linux_is_let_through() -> None:
    system.require("linux")
    with pytest.raises(UsageError, match="this system is cygwin"):
        system.require("cygwin")
