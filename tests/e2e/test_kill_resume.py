"""Kill -9 of trainer, engine or driver at random moments; the same command resumes to the identical curve.

The points are spread over the whole life of a run: start-up, steps, checkpoints, export. Each kill hits a run that
earlier kills may already have interrupted, so resumes of resumes are covered too.
"""

from __future__ import annotations

import os
import random
import time

from ci.declare import register_cpu_ci

register_cpu_ci(est_time=400, suite="stage-b-cpu", nightly=True, timeout=1800)

STEPS = ("run.steps=60", "run.checkpoint_every=5", "run.evaluate_prompts=0", "expect={}")
KILLS = int(os.environ.get("KILL_POINTS", "20"))
ROLES = ("trainer", "engine", "driver")
PER_RUN = 4
# Past the last step of a run on an idle machine, so that export and shutdown are hit as well.
LATEST_S = 14.0


def test_twenty_random_kills_resume_to_the_identical_curve(runs, reference):
    rng = random.Random(20)
    done = []
    while len(done) < KILLS:
        name = f"run{len(done)}"
        for _ in range(PER_RUN):
            killed = _kill_once(runs, name, role=ROLES[len(done) % len(ROLES)], after_s=rng.uniform(2.0, LATEST_S))
            if killed is None:
                break
            done.append(killed)
        final = runs.run(name, *STEPS)
        assert final.returncode == 0, (done, final.stderr)
        assert runs.curve(name) == reference.curve, done
    print(f"{len(done)} kill points: {done}")
    assert {role for role, _, _ in done} == set(ROLES)


def _kill_once(runs, name: str, *, role: str, after_s: float) -> tuple[str, float, int] | None:
    """Start or resume the run and kill one process; (role, seconds, rows written), or None when it finished first."""
    process = runs.start(name, *STEPS)
    started = time.monotonic()
    while time.monotonic() - started < after_s or not runs.processes(process)[role]:
        if process.poll() is not None:
            process.communicate()
            assert process.returncode == 0
            return None
        time.sleep(0.05)
    runs.processes(process)[role][0].kill()
    process.communicate(timeout=60)
    return role, round(after_s, 2), len(runs.rows(name))
