"""Trainer and engine in turns on the same device give what they give side by side."""

from __future__ import annotations

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=80, suite="stage-b-cpu")

STEPS = ("run.steps=12", "run.checkpoint_every=4", "eval.sets=[{name: held_out, prompts: 8}]", "expect={}")
COLOCATED = (*STEPS, "placement.mode=colocated")


def test_colocated_gives_the_curve_of_disaggregated_bit_for_bit(runs, reference) -> None:
    done = runs.run("together", *COLOCATED)
    assert done.returncode == 0, done.stderr
    assert runs.curve("together") == reference.curve
    assert runs.rows("together")[0]["mismatch/abs_diff_max"] == 0.0


@pytest.mark.parametrize("role", ["trainer", "engine"])
def test_killed_colocated_run_resumes_to_the_same_curve(runs, reference, role: str) -> None:
    process = runs.start("killed", *COLOCATED)
    runs.wait_for_step("killed", 5, process)
    runs.processes(process)[role][0].kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    resumed = runs.run("killed", *COLOCATED)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 4" in resumed.stdout
    assert runs.curve("killed") == reference.curve


def test_two_ranks_and_two_engines_share_two_devices(runs) -> None:
    sets = ("run.steps=3", "eval.sets=[]", "expect={}", "train.parallel.dp=2", "engine.count=2")
    apart, together = runs.run("apart", *sets), runs.run("together", *sets, "placement.mode=colocated")
    assert (apart.returncode, together.returncode) == (0, 0), apart.stderr + together.stderr
    assert runs.curve("together") == runs.curve("apart")
