"""Kill -9 of trainer, engine or driver at random moments; the same command resumes to the identical curve.

The points are spread over the whole life of a run: start-up, steps and checkpoints, export. Each kill hits a run that
earlier kills may already have interrupted, so resumes of resumes are covered too.
"""

from __future__ import annotations

import contextlib
import os
import random
import time

import psutil
import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=400, suite="stage-b-cpu", nightly=True, timeout=1800)

TOTAL = 60
STEPS = (f"run.steps={TOTAL}", "run.checkpoint_every=5", "run.evaluate_prompts=0", "expect={}")
KILLS = int(os.environ.get("KILL_POINTS", "20"))
ROLES = ("trainer", "engine", "driver")
PER_RUN = 4
WAIT_S = 90.0


@pytest.mark.timeout(1700)
def test_twenty_random_kills_resume_to_the_identical_curve(runs, reference):
    rng = random.Random(20)
    done = []
    for number in range(3 * KILLS):
        if len(done) >= KILLS:
            break
        name = f"run{number}"
        for _ in range(PER_RUN):
            killed = _kill_once(runs, name, rng, role=ROLES[len(done) % len(ROLES)])
            if killed is None:
                break
            done.append(killed)
            print(f"kill {len(done)}: {killed}", flush=True)
        final = runs.run(name, *STEPS)
        assert final.returncode == 0, (done, final.stderr)
        assert runs.curve(name) == reference.curve, done
    print(f"{len(done)} kill points: {done}")
    assert len(done) >= KILLS
    assert {role for role, _, _ in done} == set(ROLES)
    # Start-up, steps and the end were all hit.
    assert {phase for _, phase, _ in done} == {"start", "steps", "end"}


def _kill_once(runs, name: str, rng: random.Random, *, role: str) -> tuple[str, str, int] | None:
    """Start or resume the run and kill one process; (role, phase, rows written), or None when it finished first."""
    rows = len(runs.rows(name))
    phase = rng.choices(("start", "steps", "end"), (5, 12, 3))[0] if rows < TOTAL else "end"
    least = {"start": 0, "steps": rng.randint(rows, TOTAL - 1) + 1 if rows < TOTAL else TOTAL, "end": TOTAL}[phase]
    delay_s = rng.uniform(0.0, {"start": 8.0, "steps": 0.06, "end": 0.8}[phase])
    process = runs.start(name, *STEPS)
    # A resumed run first drops the rows after its checkpoint.
    alive = _until(process, lambda: phase == "start" or len(runs.rows(name)) >= least)
    if alive:
        time.sleep(delay_s)
        alive = _until(process, lambda: bool(runs.processes(process)[role]))
    if not alive:
        process.communicate()
        assert process.returncode == 0
        return None
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        runs.processes(process)[role][0].kill()
    process.communicate(timeout=WAIT_S)
    return role, phase, len(runs.rows(name))


def _until(process, condition) -> bool:
    """Wait for the condition; False when the process ended before."""
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if condition():
                return True
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return False
