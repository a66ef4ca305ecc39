"""Runs of the command line as a user starts them, in a folder of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "fast" / "docs" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "fast/miles/observe/helpers"))
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 300
# Metrics that time decides; everything else in a row must repeat exactly. How many prompt tokens were found in the
# cache depends on which requests were in the engine together.
TIMED = ("time/", "rollout/tokens_per_s", "rollout/prefix_cached_frac")


@dataclass
class Runs:
    """Starts `miles train` with its run folders below `folder`."""

    folder: Path
    temporary: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(
        self,
        name: str,
        *sets: str,
        recipe: str = "recipes/quickstart.yaml",
        fresh: bool = False,
        dry_run: bool = False,
    ) -> list[str]:
        options = [f"name={name}", f"run.directory={self.folder}", *sets]
        command = [sys.executable, "-m", "miles.cli", "train", recipe]
        command += [word for text in options for word in ("--set", text)]
        return command + ["--fresh"] * fresh + ["--dry-run"] * dry_run

    def start(
        self, name: str, *sets: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(name, *sets, **options),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), **(environment or {})},
        )
        self.started.append(process)
        return process

    def run(self, name: str, *sets: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr as text."""
        process = self.start(name, *sets, **options)
        out, err = process.communicate(timeout=RUN_LIMIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def curve(self, name: str) -> list[dict[str, Any]]:
        """Rows without what time decides: equal runs have equal curves, bit for bit."""
        return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in self.rows(name)]

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        wait_until(lambda: process.poll() is not None or len(self.rows(name)) > step, f"step {step} of {name}")

    def processes(self, process: subprocess.Popen[str]) -> dict[str, list[psutil.Process]]:
        """Living processes of a run by role."""
        found: dict[str, list[psutil.Process]] = {"driver": [psutil.Process(process.pid)], "trainer": [], "engine": []}
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                words = " ".join(child.cmdline())
            except psutil.Error:
                continue
            if "TrainWorker" in words:
                found["trainer"].append(child)
            elif "miles.rollout.engines.embedded" in words:
                found["engine"].append(child)
        return found


def run_processes(folder: Path) -> list[str]:
    """Command lines of living processes that belong to runs below `folder`, Ray's included."""
    left = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            left.append(words[:200])
    return left


@contextlib.contextmanager
def isolated_runs(folder: Path) -> Iterator[Runs]:
    """Runs whose Ray folders lie below a folder of their own, so that what they leave behind can be told apart."""
    # Short: Ray's socket paths below it have a length limit.
    temporary = Path(tempfile.mkdtemp(prefix="mt", dir="/tmp"))
    handle = Runs(folder, temporary)
    yield handle
    for process in handle.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    wait_until(lambda: not run_processes(temporary), f"processes of {temporary} to end: {run_processes(temporary)}", 20)
    shutil.rmtree(temporary)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with isolated_runs(tmp_path) as handle:
        yield handle


@dataclass(frozen=True)
class Reference:
    """The run that was not disturbed."""

    done: subprocess.CompletedProcess[str]
    folder: Path
    rows: list[dict[str, Any]]
    curve: list[dict[str, Any]]


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """One whole run with the module's `STEPS`."""
    with isolated_runs(tmp_path_factory.mktemp("reference")) as handle:
        done = handle.run("whole", *request.module.STEPS)
        assert done.returncode == 0, done.stderr
        yield Reference(done, handle.folder / "whole", handle.rows("whole"), handle.curve("whole"))
