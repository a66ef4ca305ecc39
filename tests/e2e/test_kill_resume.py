"""Kill -9 and SIGSTOP of every kind of process at random moments; the same command resumes to the identical curve.

The points are spread over the whole life of a run (start-up, steps and checkpoints, export) and over its processes: the
driver, trainers, engines, reward workers and their server, Ray's daemons and agents, the sweeper. Each hits a run that
earlier ones may already have interrupted, so resumes of resumes are covered too. After each end nothing that descended
from the driver is alive.

A stopped process is not an ended one: the run waits for it as long as its limits say. A stopped driver is killed after a
moment, as a scheduler does.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from family_tree import descendants, kinds, require_gone

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=900, suite="stage-b-cpu", nightly=True, timeout=1800)

TOTAL = 60
REWARD = Path(__file__).parent / "helpers" / "judged.py"
STEPS = (
    f"run.steps={TOTAL}", "run.checkpoint_every=5", "eval.sets=[]", "expect={}", "run.timeout_s=30",
    "rollout.request_timeout_s=30", "rollout.reward.kind=python", "rollout.reward.timeout_s=15",
    f"rollout.reward.options.path=python:{REWARD}:score",
)  # fmt: skip
KILLS = int(os.environ.get("KILL_POINTS", "32"))
# The run's own first, then Ray's; each with both signals.
KINDS = (
    "trainer", "engine", "driver", "raylet", "gcs", "sweeper", "dashboard agent", "environment agent", "reward server",
    "reward worker", "engine actor", "log monitor", "monitor", "dashboard",
)  # fmt: skip
TARGETS = tuple((kind, number) for number in (signal.SIGKILL, signal.SIGSTOP) for kind in KINDS)
# Ray starts these at times, ahead of actors.
IN_PASSING = {"idle worker"}
PER_RUN = 4
WAIT_S = 300.0
DRIVER_STOPPED_S = 2.0


@dataclass(frozen=True)
class Hit:
    """What was done to which process, in which phase; rows written when the run had ended."""

    role: str
    signal: str
    phase: str
    rows: int
    code: int


@pytest.mark.timeout(3590)
def test_kills_and_stops_of_every_process_resume_to_the_identical_curve(runs, reference):
    rng = random.Random(20)
    done: list[Hit] = []
    for number in range(3 * KILLS):
        if len(done) >= KILLS:
            break
        name = f"run{number}"
        for _ in range(PER_RUN):
            hit = _hit_once(runs, name, rng, *TARGETS[len(done) % len(TARGETS)])
            if hit is None:
                break
            done.append(hit)
            print(f"{len(done)}: {hit}", flush=True)
            if hit.code == 0:
                break
        final = runs.run(name, *STEPS)
        assert final.returncode == 0, (done, final.stderr)
        assert runs.curve(name) == reference.curve, done
    assert len(done) >= KILLS
    if len(TARGETS) <= KILLS:
        assert {(hit.role, hit.signal) for hit in done} == {(role, number.name) for role, number in TARGETS}
        # Start-up, steps and the end were all hit.
        assert {hit.phase for hit in done} == {"start", "steps", "end"}


def _hit_once(runs, name: str, rng: random.Random, role: str, number: signal.Signals) -> Hit | None:
    """Start or resume the run and hit one process; None when the run finished first."""
    rows = len(runs.rows(name))
    phase = rng.choices(("start", "steps", "end"), (5, 12, 3))[0] if rows < TOTAL else "end"
    least = {"start": 0, "steps": rng.randint(rows, TOTAL - 1) + 1 if rows < TOTAL else TOTAL, "end": TOTAL}[phase]
    delay_s = rng.uniform(0.0, {"start": 8.0, "steps": 0.06, "end": 0.8}[phase])
    process = runs.start(name, *STEPS)
    # A resumed run first drops the rows after its checkpoint.
    alive = _until(process, lambda: phase == "start" or len(runs.rows(name)) >= least)
    if alive:
        time.sleep(delay_s)
        alive = _until(process, lambda: bool(_targets(process.pid, role)))
    if not alive:
        process.communicate()
        assert process.returncode == 0
        return None
    family = descendants(process.pid)
    # A kind of process that nobody thought of is to be hit, too.
    assert kinds(family).keys() <= {*KINDS, *IN_PASSING}
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        _targets(process.pid, role)[0].send_signal(number)
    if role == "driver" and number == signal.SIGSTOP:
        time.sleep(DRIVER_STOPPED_S)
        process.kill()
    seen = {*family}
    _until(process, lambda: seen.update(descendants(process.pid)), every_s=0.2)
    process.communicate(timeout=WAIT_S)
    require_gone([*seen], f"the family of a run whose {role} got {number.name}")
    return Hit(role, number.name, phase, len(runs.rows(name)), process.returncode)


def _targets(pid: int, role: str) -> list[psutil.Process]:
    if role == "driver":
        return [psutil.Process(pid)]
    return kinds(descendants(pid)).get(role, [])


def _until(process, condition, *, every_s: float = 0.01) -> bool:
    """Wait for the condition; False when the process ended before."""
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if condition():
                return True
        assert time.monotonic() < deadline
        time.sleep(every_s)
    return False
