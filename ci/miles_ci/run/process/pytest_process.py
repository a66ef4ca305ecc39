"""One supervised pytest process for one or several units: command line, environment, evidence."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_ci.plan.model import Unit
from miles_ci.run.judge import pytest_events
from miles_ci.run.judge.judge import ProcessEvidence
from miles_ci.run.process import supervisor_client
from miles_ci.run.slug import slug

TAIL_BYTES = 256 << 10
CPU_WORKERS = 2
_PACKAGE_PARENT = Path(__file__).resolve().parents[3]
_PER_TEST_VARIABLES = ("MILES_CI_LEASE", "MILES_CI_OBSERVED", "MILES_CI_UNIT", "MILES_CI_METRICS_DIR")


@dataclass(frozen=True)
class Files:
    """Where one process writes: its log (kept), events, JUnit and metrics (read back, kept for debugging).

    What an earlier run left under the same names is gone: it must never be taken for evidence of this one.
    """

    log: Path
    events: Path
    junit: Path
    metrics: Path
    cache: Path

    @classmethod
    def below(cls, folder: Path, name: str, attempt: int) -> Files:
        stem = f"{slug(name)}.{attempt}"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        work = folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        files = cls(
            log=folder / "logs" / f"{stem}.log",
            events=work / f"{stem}.events.jsonl",
            junit=work / f"{stem}.junit.xml",
            metrics=work / f"{stem}.metrics",
            cache=work / "cache",
        )
        for path in (files.log, files.events, files.junit):
            path.unlink(missing_ok=True)
        if files.metrics.exists():
            shutil.rmtree(files.metrics)
        return files


def command_line(units: Sequence[Unit], files: Files, *, workers: int | None) -> list[str]:
    """`workers` None: no xdist (GPU files and serial files); a number: that many workers, groups kept together."""
    # By name, so that it is there too where PYTEST_DISABLE_PLUGIN_AUTOLOAD is set.
    # A replaced worker may wait for ever for work; the first death ends the session, and the rest runs again.
    shared = ["-p", "xdist", "-n", str(workers), "--dist", "loadgroup", "--max-worker-restart", "0"]
    distribution = ["-p", "no:xdist"] if workers is None else shared
    options = [
        "-p", "miles_ci.run.process.event_writer",
        *distribution,
        "--continue-on-collection-errors",
        "-o", "junit_family=xunit1",
        "-o", f"cache_dir={files.cache}",
        f"--junitxml={files.junit}",
    ]  # fmt: skip
    return [sys.executable, "-m", "pytest", *options, *(word for unit in units for word in unit.targets())]


def environment(base: Mapping[str, str], files: Files, extra: Mapping[str, str], *, gpu: bool) -> dict[str, str]:
    """The environment of a test process; `extra` wins (lease, suite, visibility)."""
    env = {name: value for name, value in base.items() if name not in _PER_TEST_VARIABLES}
    env["MILES_CI_OBSERVED"] = str(files.events)
    env["MILES_CI_METRICS_DIR"] = str(files.metrics)
    env["PYTHONUNBUFFERED"] = "1"
    if gpu:
        # The unit's own limit rules; a per-item limit meant for fast tests would cut long ones short.
        env["PYTEST_TIMEOUT"] = "0"
    if str(_PACKAGE_PARENT) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(_PACKAGE_PARENT))))
    env.update(extra)
    return env


def run(
    units: Sequence[Unit],
    files: Files,
    *,
    root: Path,
    env: Mapping[str, str],
    timeout_s: float,
    workers: int | None,
    private_fds: Sequence[int] = (),
    cancel: threading.Event | None = None,
    on_tick: Callable[[], None] | None = None,
) -> ProcessEvidence:
    """Run pytest on the units and gather what it left behind."""
    command = supervisor_client.Command(
        argv=command_line(units, files, workers=workers),
        cwd=root,
        env=env,
        log=files.log,
        timeout_s=timeout_s,
        private_fds=private_fds,
    )
    ended = supervisor_client.run(command, cancel=cancel, on_tick=on_tick)
    return ProcessEvidence(
        ended=ended,
        observed=pytest_events.read_events(files.events),
        junit=pytest_events.read_junit(files.junit),
        log_tail=read_tail(files.log),
    )


def read_tail(path: Path, size: int = TAIL_BYTES) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
