"""However a run ends, nothing of it or of Ray is left seconds later; and starts wait their turn."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from family_tree import descendants, kinds, require_gone

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=300, suite="stage-b-cpu", timeout=1500)

STEPS = ("run.steps=6", "run.checkpoint_every=2", "eval.sets=[]", "expect={}")
ENDLESS = ("run.steps=100000", "run.checkpoint_every=50000", "eval.sets=[]", "expect={}")
# The sweeper's patience, the driver's, and what a slow machine adds.
STOP_BOUND_S = 75.0


def test_a_killed_driver_leaves_nothing(runs) -> None:
    process = runs.start("killed", *ENDLESS)
    runs.wait_for_step("killed", 2, process)
    family = descendants(process.pid)
    found = kinds(family)
    assert {"raylet", "gcs", "dashboard agent", "environment agent", "trainer", "engine", "sweeper"} <= found.keys()
    os.kill(process.pid, signal.SIGKILL)
    require_gone(family, "everything that descended from the driver")
    process.communicate()


def test_everything_listens_on_the_loopback_alone_and_the_folder_is_closed(runs) -> None:
    process = runs.start("quiet", *ENDLESS)
    runs.wait_for_step("quiet", 1, process)
    heard = {}
    for one in [psutil.Process(process.pid), *descendants(process.pid)]:
        for connection in one.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                heard.setdefault(connection.laddr.ip.removeprefix("::ffff:"), []).append(one.name())
    assert set(heard) == {"127.0.0.1"}, heard
    folders = [path for path in runs.temporary.iterdir() if path.is_dir() and path.name.startswith("miles-ray-")]
    assert [oct(path.stat().st_mode & 0o777) for path in folders] == ["0o700"]
    process.terminate()
    family = descendants(process.pid)
    process.communicate(timeout=STOP_BOUND_S)
    assert process.returncode == 130
    require_gone(family, "a run that was asked to end")


@pytest.mark.parametrize("kind", ["raylet", "gcs"])
def test_a_stopped_daemon_does_not_keep_a_finished_run_from_ending(runs, kind: str) -> None:
    process = runs.start(kind, *STEPS)
    runs.wait_for_step(kind, 5, process)
    family = descendants(process.pid)
    (daemon,) = kinds(family)[kind]
    daemon.suspend()
    started = time.monotonic()
    _, error = process.communicate(timeout=STOP_BOUND_S)
    assert process.returncode == 0, error
    assert (runs.folder / kind / "result.json").exists()
    require_gone(family, f"a run whose {kind} was stopped")
    print(f"ended {time.monotonic() - started:.1f} s after its {kind} was stopped")


def test_runs_that_are_started_together_take_turns_and_all_finish(runs) -> None:
    processes = {f"run{number}": runs.start(f"run{number}", *STEPS) for number in range(4)}
    said = {name: process.communicate(timeout=600) for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), said
    assert any("waiting for another run to start Ray" in out + err for out, err in said.values())
