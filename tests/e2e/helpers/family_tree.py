"""Every process that descends from a driver, seen from outside: what must be gone when it is."""

from __future__ import annotations

import time

import psutil

GONE_WITHIN_S = 5.0


def descendants(pid: int) -> list[psutil.Process]:
    """Living children of all generations; empty when the process is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those that live, in words."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    return found


def kinds(processes: list[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """By what they are: Ray's daemons and agents, trainers, engines, the server of reward workers and those, the sweeper."""
    marks = {
        "raylet": "raylet/raylet", "gcs": "gcs_server", "monitor": "monitor.py", "dashboard": "dashboard.py",
        "log monitor": "log_monitor.py", "dashboard agent": "ray::DashboardAgent", "environment agent": "ray::RuntimeEnvAgent",
        "trainer": "TrainWorker", "engine actor": "EngineActor", "engine": "miles.rollout.engines.embedded",
        "idle worker": "ray::IDLE", "reward server": "reward_worker", "sweeper": "sweeper.py",
    }  # fmt: skip
    found: dict[str, list[psutil.Process]] = {}
    for process in processes:
        try:
            words = " ".join(process.cmdline())
            copied = process.parent() in processes and process.parent().cmdline() == process.cmdline()
        except (psutil.Error, AttributeError):
            continue
        for kind, mark in marks.items():
            if mark in words and not (kind in ("monitor", "dashboard") and "log_monitor.py" in words):
                found.setdefault("reward worker" if copied and kind == "reward server" else kind, []).append(process)
                break
    return found


def require_gone(processes: list[psutil.Process], what: str) -> None:
    """`AssertionError` names what still lives after `GONE_WITHIN_S`."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := alive(processes):
        assert time.monotonic() < deadline, f"{GONE_WITHIN_S:g} s after the end of {what}: {left}"
        time.sleep(0.02)
