"""However a run ends, nothing of it or of Ray is left seconds later; and starts wait their turn."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from family_tree import descendants, kinds, require_gone
from waiting import wait_until

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=420, suite="stage-b-cpu", timeout=1800)

STEPS = ("run.steps=6", "run.checkpoint_every=2", "eval.sets=[]", "expect={}")
ENDLESS = ("run.steps=100000", "run.checkpoint_every=50000", "eval.sets=[]", "expect={}")
REWARD = Path(__file__).parent / "helpers" / "judged.py"
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


@pytest.mark.parametrize("kind", ["raylet", "gcs", "trainer"])
def test_a_run_whose_process_is_stopped_still_ends_when_it_is_asked_to(runs, kind: str) -> None:
    process = runs.start(kind, *ENDLESS)
    runs.wait_for_step(kind, 1, process)
    family = descendants(process.pid)
    kinds(family)[kind][0].suspend()
    process.terminate()
    _, error = process.communicate(timeout=STOP_BOUND_S)
    assert process.returncode == 130, error
    require_gone(family, f"a run whose {kind} was stopped")


@pytest.mark.parametrize("kind", ["raylet", "gcs"])
def test_a_start_that_hangs_still_ends_when_it_is_asked_to(runs, kind: str) -> None:
    """A stopped `gcs` lets `ray.init` wait in its own library for ever, where Python runs no handler."""
    process = runs.start(kind, *ENDLESS)
    wait_until(lambda: process.poll() is not None or kinds(descendants(process.pid)).get(kind), f"the {kind}")
    family = descendants(process.pid)
    kinds(family)[kind][0].suspend()
    time.sleep(2)
    family = {*family, *descendants(process.pid)}
    process.terminate()
    _, error = process.communicate(timeout=STOP_BOUND_S)
    assert process.returncode == 130, error
    require_gone([*family], f"a start whose {kind} was stopped")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_outlives_its_sweeper_and_has_another_one(runs, number: signal.Signals) -> None:
    process = runs.start("swept", *ENDLESS)
    runs.wait_for_step("swept", 1, process)
    (first,) = kinds(descendants(process.pid))["sweeper"]
    first.send_signal(number)
    wait_until(
        lambda: first not in (found := kinds(descendants(process.pid)).get("sweeper", [])) and found, "another sweeper"
    )
    family = descendants(process.pid)
    process.kill()
    require_gone(family, "everything that descended from the driver")
    process.communicate()


def test_reward_workers_that_are_stopped_go_with_a_killed_driver(runs) -> None:
    """Stopped, they do not see the end of the driver themselves."""
    reward = ("rollout.reward.kind=python", f"rollout.reward.options.path=python:{REWARD}:score")
    process = runs.start("rewarded", *ENDLESS, *reward)
    runs.wait_for_step("rewarded", 1, process)
    family = descendants(process.pid)
    found = kinds(family)
    for one in found["reward server"] + found["reward worker"]:
        one.suspend()
    process.kill()
    require_gone(family, "everything that descended from the driver")
    process.communicate()


def test_runs_that_are_started_together_take_turns_and_all_finish(runs) -> None:
    processes = {f"run{number}": runs.start(f"run{number}", *STEPS) for number in range(4)}
    said = {name: process.communicate(timeout=600) for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), said
    assert any("waiting for another run to start Ray" in out + err for out, err in said.values())
