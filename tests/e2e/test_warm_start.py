"""Supervised runs, and two phases by one command: no engine where answers are given, and the same after a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=110, suite="stage-b-cpu", timeout=600)

SFT = "recipes/spell_backward_sft.yaml"
SHORT = ("run.steps=40", "run.checkpoint_every=10", "eval.every=20", "expect={}")


def kill(process) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.timeout(300)
def test_given_answers_are_learnt_without_an_engine_and_the_same_after_a_kill(runs):
    whole = runs.start("whole", *SHORT, recipe=SFT)
    runs.wait_for_step("whole", 0, whole)
    living = runs.processes(whole)
    assert len(living["trainer"]) == 1
    assert living["engine"] == []
    out, err = whole.communicate(timeout=120)
    assert whole.returncode == 0, err
    assert "whole: loss " in out
    rows = runs.rows("whole")
    held_out = [row["eval/held_out/loss"] for row in rows if "eval/held_out/loss" in row]
    assert len(held_out) == 3
    assert held_out[0] > held_out[1] > held_out[2]
    assert "rollout/reward_mean" not in rows[0]
    assert not list((runs.folder / "whole" / "logs").glob("engine*"))
    assert (runs.folder / "whole" / "loss.png").stat().st_size > 0

    killed = runs.start("killed", *SHORT, recipe=SFT)
    runs.wait_for_step("killed", 14, killed)
    kill(killed)
    resumed = runs.run("killed", *SHORT, recipe=SFT)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stdout
    assert runs.curve("killed") == runs.curve("whole")
    model = ("model.safetensors", "config.json", "chat_template.jinja")
    for name in model:
        first, second = (runs.folder / run / "hf_model" / name for run in ("whole", "killed"))
        assert first.read_bytes() == second.read_bytes(), name


@pytest.fixture
def phases(tmp_path) -> Path:
    """The shipped pair with fewer steps, in a folder of its own."""
    root = Path(__file__).resolve().parents[2] / "recipes"
    (tmp_path / "mine").mkdir()
    for name in ("data", "reasoning_gym.yaml"):
        (tmp_path / "mine" / name).symlink_to(root / name)
    first = (root / "spell_backward_sft.yaml").read_text().replace("steps: 300", "steps: 30").partition("\nexpect:")[0]
    (tmp_path / "mine" / "spell_backward_sft.yaml").write_text(first)
    (tmp_path / "mine" / "sft_then_grpo.yaml").symlink_to(root / "sft_then_grpo.yaml")
    return tmp_path / "mine" / "sft_then_grpo.yaml"


@pytest.mark.timeout(300)
def test_two_phases_run_by_one_command_and_a_kill_in_the_second_changes_nothing(runs, phases):
    short = ("run.steps=6", "run.checkpoint_every=2", "eval.sets=[]", "expect={}")
    whole = runs.run("whole", *short, recipe=str(phases))
    assert whole.returncode == 0, whole.stderr
    assert "spell_backward_sft: loss " in whole.stdout
    first = runs.folder / "spell_backward_sft"
    recorded = json.loads((runs.folder / "whole" / "inputs.json").read_text())["files"]
    assert str(first / "hf_model" / "model.safetensors") in recorded
    before = (first / "metrics.jsonl").read_bytes()
    rows = runs.rows("whole")
    # What the first phase taught is there at the second's first step.
    assert rows[0]["rollout/reward_mean"] > 0.1

    killed = runs.start("killed", *short, recipe=str(phases))
    runs.wait_for_step("killed", 2, killed)
    kill(killed)
    resumed = runs.run("killed", *short, recipe=str(phases))
    assert resumed.returncode == 0, resumed.stderr
    assert "spell_backward_sft: this run is finished" in resumed.stdout
    assert runs.curve("killed") == runs.curve("whole")
    assert (first / "metrics.jsonl").read_bytes() == before


@pytest.mark.timeout(120)
def test_faults_of_the_second_phase_are_told_before_the_first_takes_its_time(runs, phases):
    done = runs.run("late", "rollout.max_new_tokens=4000", recipe=str(phases))
    assert done.returncode == 2
    assert "SEQ-FIT" in done.stderr
    assert not (runs.folder / "spell_backward_sft").exists()
