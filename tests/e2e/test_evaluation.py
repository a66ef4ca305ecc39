"""Evaluation inside a run: training stays as it is bit for bit, the best checkpoint survives kills, `miles eval` agrees."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from miles.config.metric_names import unregistered
from miles.evaluate.best import Best, read_best
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=180, suite="stage-b-cpu", timeout=900)

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 120
SETS = "eval.sets=[{name: greedy, prompts: 8}, {name: drawn, prompts: 4, samples_per_prompt: 4, temperature: 1.0}]"
SHORT = ("run.steps=8", "run.checkpoint_every=2", "train.checkpoint_keep=1", "expect={}")
STEPS = (*SHORT, SETS, "eval.every=2", "run.keep_best=eval/drawn/best_of_4")
ASYNC = "recipes/quickstart_async.yaml"
# Weights that never change, as no step is large enough to move a float: behind the policy, time decides which version of
# them a sample is drawn from.
FROZEN = ("train.optimizer.lr=1e-30", "train.optimizer.weight_decay=0.0")
BY_TIME = ("rollout/staleness_mean", "rollout/staleness_max")


def trained(curve: list[dict[str, Any]], *without: str) -> list[dict[str, Any]]:
    """Rows of steps without what evaluations found."""
    steps = [row for row in curve if "train/loss" in row]
    return [{k: v for k, v in row.items() if not k.startswith("eval/") and k not in without} for row in steps]


def best_of(runs_folder: Path, name: str) -> Best:
    found = read_best(runs_folder / name / "best")
    assert found is not None
    return found


def test_the_curve_is_that_of_a_run_without_evaluation(runs, reference) -> None:
    done = runs.run("plain", *SHORT, "eval.sets=[]")
    assert done.returncode == 0, done.stderr
    assert runs.curve("plain") == trained(reference.curve)
    assert [row["step"] for row in reference.rows if "eval/drawn/pass_at_4" in row] == [0, 2, 4, 6, 8]
    assert [unregistered(row) for row in reference.rows] == [[]] * 9


def test_metrics_are_in_the_log_the_trackers_and_the_result(reference) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(reference.folder / "tensorboard")).Reload()
    rows = {row["step"]: row["eval/drawn/best_of_4"] for row in reference.rows if "eval/drawn/best_of_4" in row}
    assert {event.step: event.value for event in events.Scalars("eval/drawn/best_of_4")} == pytest.approx(rows)
    result = json.loads((reference.folder / "result.json").read_text())
    assert result["eval/drawn/best_of_4"] == rows[8]
    assert result["best"]["value"] == max(rows.values())
    assert "after 4 steps: greedy reward 0." in reference.done.stdout


def test_behind_the_policy_the_curve_is_the_same_too(runs) -> None:
    plain = runs.run("plain", *SHORT, *FROZEN, "eval.sets=[]", recipe=ASYNC)
    assert plain.returncode == 0, plain.stderr
    evaluated = runs.run("evaluated", *SHORT, *FROZEN, SETS, "eval.every=1", recipe=ASYNC)
    assert evaluated.returncode == 0, evaluated.stderr
    assert trained(runs.curve("evaluated"), *BY_TIME) == trained(runs.curve("plain"), *BY_TIME)
    found = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in runs.rows("evaluated")]
    assert len(found) == 9
    assert all(row == found[0] for row in found)


def test_the_best_checkpoint_survives_pruning_and_kill_9_and_is_what_miles_eval_measures(runs, reference) -> None:
    process = runs.start("killed", *STEPS)
    wait_until(lambda: process.poll() is not None or len(runs.rows("killed")) > 5, "step 5 of killed")
    assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=RUN_LIMIT_S)
    kept = best_of(runs.folder, "killed")
    assert kept.checkpoint.is_dir()
    resumed = runs.run("killed", *STEPS)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.curve("killed") == reference.curve
    whole, again = best_of(reference.folder.parent, "whole"), best_of(runs.folder, "killed")
    assert (again.step, again.value) == (whole.step, whole.value)
    assert [path.name for path in (runs.folder / "killed" / "checkpoints").glob("iter_*")] == ["iter_8"]
    # Another checkpoint than the newest, so that the kept one alone can answer.
    shutil.rmtree(runs.folder / "killed" / "checkpoints")
    row = next(row for row in reference.rows if row["step"] == again.step)
    expected = {k: v for k, v in row.items() if k.startswith("eval/")}
    for chosen in (("--checkpoint", str(again.step)), ("--model", str(again.exported_model))):
        assert evaluated(runs, "killed", *chosen) == expected


def evaluated(runs, name: str, *chosen: str) -> dict[str, float]:
    sets = [word for text in (f"name={name}", f"run.directory={runs.folder}", *STEPS) for word in ("--set", text)]
    command = [sys.executable, "-m", "miles.cli", "eval", "recipes/quickstart.yaml", *sets, *chosen, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
