"""The real loop on CPU: Ray, megatron-core on gloo, the embedded engine over HTTP.

One uninterrupted run is the reference of every comparison; kills at many random points are in test_kill_resume.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.config.metric_table import COLUMNS, STEP
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=150, suite="stage-b-cpu")

STEPS = ("run.steps=12", "run.checkpoint_every=4", "eval.sets=[{name: held_out, prompts: 8}]", "expect={}")
REQUIRED = ("step", "rollout/reward_mean", "train/loss", "train/grad_norm", "mismatch/abs_diff_mean", "time/step")


def test_a_run_leaves_everything_a_user_needs(reference):
    done, folder, rows = reference.done, reference.folder, reference.rows
    assert done.returncode == 0, done.stderr
    assert re.search(r"^whole: reward 0\.\d+ -> 0\.\d+ in [\d.]+ s \(12 steps\)$", done.stdout, re.MULTILINE)
    # The last one is the evaluation after the last step.
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[-1]["eval/held_out/prompts"] == 8
    assert all(key in row for row in rows[:-1] for key in REQUIRED)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (folder / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert "plotly" in (folder / "reward.html").read_text()
    assert json.loads((folder / "result.json").read_text())["steps"] == 12
    assert (folder / "checkpoints" / "iter_12" / "COMPLETE").exists()


def test_trainer_and_engine_log_probs_agree_bit_for_bit_at_every_step(reference):
    assert [row["mismatch/abs_diff_max"] for row in reference.rows[:-1]] == [0.0] * 12


def test_a_row_has_exactly_the_metrics_that_are_listed_for_every_step(reference):
    # The last entry of a metric says what a recipe must have for it; this one is on policy with a loss of advantages.
    here = ("", "on policy", "a loss of advantages, no teacher")
    listed = {metric.name for metric in (*COLUMNS, *STEP) if metric.when in here}
    assert [sorted(listed ^ row.keys()) for row in reference.rows[:-1]] == [[]] * 12


def test_transformers_loads_the_exported_model(reference):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(reference.folder / "hf_model")
    tokenizer = AutoTokenizer.from_pretrained(reference.folder / "hf_model")
    logits = model(tokenizer("123=", return_tensors="pt")["input_ids"]).logits
    assert logits.shape[-1] == len(tokenizer)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("parallel", ["tp", "dp"])
def test_two_ranks_take_the_same_first_step_as_one(runs, reference, parallel):
    two = runs.run("two", "run.steps=1", "eval.sets=[]", "expect={}", f"train.parallel.{parallel}=2")
    assert two.returncode == 0, two.stderr
    first, second = reference.rows[0], runs.rows("two")[0]
    assert second["rollout/reward_mean"] == first["rollout/reward_mean"]
    for key in ("train/loss", "train/grad_norm"):
        assert second[key] == pytest.approx(first[key], abs=1e-5, rel=1e-5)


def test_two_runs_at_once_do_not_meet(runs, reference):
    together = [runs.start(name, *STEPS) for name in ("left", "right")]
    for process in together:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert runs.curve("left") == reference.curve
    assert runs.curve("right") == reference.curve


@pytest.mark.parametrize("role", ["trainer", "engine", "driver"])
def test_killed_process_ends_the_run_and_the_same_command_resumes_the_same_curve(runs, reference, role):
    process = runs.start("killed", *STEPS)
    runs.wait_for_step("killed", 5, process)
    runs.processes(process)[role][0].kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0, err
    if role != "driver":
        assert "run the same command again to resume" in err
    resumed = runs.run("killed", *STEPS)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 4" in resumed.stdout
    assert runs.curve("killed") == reference.curve
    (events,) = (runs.folder / "killed" / "tensorboard").iterdir()
    read = EventAccumulator(str(events))
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == list(range(12))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_cleanly_and_a_second_run_in_the_folder_is_refused(runs, number):
    first = runs.start("same", "run.steps=4000")
    runs.wait_for_step("same", 0, first)
    second = runs.run("same", "run.steps=4000")
    assert second.returncode == 2
    assert f"a run with process id {first.pid} is using this folder" in second.stderr
    os.kill(first.pid, number)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "run the same command again to resume" in err


def test_finished_run_is_reported_and_a_missed_expectation_fails_the_command(runs):
    options = ("run.steps=1", "eval.sets=[]", "observe.trackers=[]")
    missed = runs.run("low", *options)
    assert missed.returncode == 1
    assert "rollout/reward_mean: mean of the last 1 steps" in missed.stderr
    again = runs.run("low", *options)
    assert "this run is finished" in again.stdout
    assert (again.returncode, again.stderr) == (1, missed.stderr)


def test_damaged_files_of_a_run_are_refused_with_a_way_on(runs, reference):
    def refused() -> str:
        done = runs.run("whole", *STEPS)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    folder = runs.folder / "whole"
    shutil.copytree(reference.folder, folder)
    # The digest holds the folder of the runs.
    stored = json.loads((folder / "recipe.json").read_text())
    stored["recipe"]["run"]["directory"] = str(runs.folder)
    (folder / "recipe.json").write_text(json.dumps(stored))
    assert runs.run("whole", *STEPS).returncode == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))
    assert "metrics.jsonl: holds 5 rows, the finished run needs 12 (step 5 is the first one missing)" in refused()
    (folder / "result.json").unlink()
    assert "metrics.jsonl: holds 5 rows, the checkpoint after step 12 needs 12 (step 5 is the first" in refused()
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: is not a file; move it away" in refused()
    (folder / "result.json").write_text("{}")
    assert "result.json: is not the result of a run" in refused()


def test_a_reader_of_the_output_that_goes_away_stops_the_run_with_a_message(runs):
    process = runs.start("piped", "run.steps=4000")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 1
    assert err.strip().endswith("what read the output has ended; run the same command again to resume")


def test_a_run_that_learns_nothing_says_so_and_fails_only_where_its_recipe_asks(runs, tmp_path):
    (tmp_path / "nothing.py").write_text("def nothing(completion, answer, metadata):\n    return 0.0\n")
    sets = ("run.steps=4", "eval.sets=[]", "run.no_gradient_warning_steps=3", "rollout.reward.kind=python")
    sets += (f"rollout.reward.options.path=python:{tmp_path}/nothing.py:nothing",)
    plain = runs.run("plain", *sets, "expect={}")
    assert plain.returncode == 0, plain.stderr
    warnings = [line for line in plain.stdout.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "3 steps in a row carried no gradient (step 2: every sample had the reward 0.000)" in warnings[0]
    asked = runs.run("asked", *sets, "expect={train/steps_without_gradient: {max: 3, over: 1}}")
    assert asked.returncode == 1
    assert "train/steps_without_gradient: mean of the last 1 steps is 4" in asked.stderr
