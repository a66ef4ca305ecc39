"""A new user's first project with documented keys alone: own chat data, own reward, evaluation, the best kept, W&B."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=150, suite="stage-b-cpu", timeout=600)

# Twelve lines, and one function.
RECIPE = """\
name: first
model: {create: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128}}
data:
  task: jsonl
  jsonl: {path: problems.jsonl, messages_key: messages}
  system_prompt: Repeat.
algo: {entropy_coef: 0.01, reduction: token_mean}
rollout: {max_new_tokens: 4, reward: {kind: python, options: {path: judge.py:agreement}}}
train: {optimizer: {lr: 3.0e-3}}
eval: {every: 20, sets: [{name: held_out, prompts: 16, samples_per_prompt: 4, temperature: 1.0}]}
run: {steps: 140, checkpoint_every: 20, keep_best: eval/held_out}
observe: {trackers: [wandb], wandb: {mode: offline}, finish_s: 60}
"""
JUDGE = """\
def agreement(completion: str, answer: str, metadata: dict) -> float:
    return sum(a == b for a, b in zip(completion, answer)) / max(len(completion), len(answer))
"""
PROBLEMS = 500


def project(folder: Path) -> str:
    folder.mkdir()
    draw = random.Random(0)
    words = [f"{draw.randrange(1000):03}" for _ in range(PROBLEMS)]
    rows = [{"messages": [{"role": "user", "content": word}], "answer": word} for word in words]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge.py").write_text(JUDGE)
    (folder / "first.yaml").write_text(RECIPE)
    return str(folder / "first.yaml")


@pytest.mark.timeout(500)
def test_twelve_lines_and_one_function(runs, tmp_path):
    assert len(RECIPE.splitlines()) == 12
    recipe = project(tmp_path / "mine")
    done = runs.run("whole", recipe=recipe)
    assert done.returncode == 0, done.stderr
    rows, folder = runs.rows("whole"), tmp_path / "whole"
    first = rows[0]["rollout/reward_mean"]
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert sum(rewards[-5:]) / 5 > 2 * first + 0.2

    evaluated = {row["step"]: row for row in rows if "eval/held_out/pass_at_4" in row}
    assert list(evaluated) == [0, 20, 40, 60, 80, 100, 120, 140]
    assert all(row["eval/held_out/pass_at_1"] <= row["eval/held_out/pass_at_4"] for row in evaluated.values())
    (best,) = (folder / "best").glob("step_*")
    kept = json.loads((best / "best.json").read_text())
    assert kept["value"] == max(row["eval/held_out/reward_mean"] for row in evaluated.values())
    assert (best / "hf_model" / "config.json").is_file()

    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {"prompt", "completion", "reward"} <= samples[0].keys()
    assert "Repeat." in samples[0]["prompt"]
    command = [sys.executable, "-m", "miles.cli", "samples", str(folder), "--step", "139", "--best"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Repeat." in shown
    assert list(folder.rglob("*.wandb"))

    killed = runs.start("killed", recipe=recipe)
    runs.wait_for_step("killed", 50, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    resumed = runs.run("killed", recipe=recipe)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.curve("killed") == runs.curve("whole")
