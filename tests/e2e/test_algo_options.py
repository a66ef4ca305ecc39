"""Options of the algorithm and the schedule act in a whole run, not only in the functions behind them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=60, suite="stage-b-cpu")

SHORT = ("run.steps=3", "eval.sets=[]", "observe.trackers=[]", "expect={}")
EXACT_KL = ("algo.kl.where=loss", "algo.kl.estimator=support_exact", "algo.kl.coef=0.1")


def finished(runs, name: str, *options: str) -> list[dict[str, float]]:
    done = runs.run(name, *SHORT, *options)
    assert done.returncode == 0, done.stderr
    return runs.rows(name)


def test_exact_kl_grows_from_zero_on_the_samplers_support_and_such_a_step_replays(runs):
    rows = finished(runs, "exact", *EXACT_KL, "rollout.top_p=0.9", "run.replay_steps=[1]")
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-7)
    assert rows[1]["train/kl"] > 1e-3
    assert rows[1]["train/kl_loss"] == pytest.approx(rows[1]["train/kl"], rel=1e-5)
    bundle = runs.folder / "exact" / "replay" / "step_1"
    command = [sys.executable, "-m", "miles.cli", "replay", str(bundle)]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert replayed.returncode == 0, replayed.stderr
    assert "reproduced (bit) on 1 rank(s)" in replayed.stdout


def test_kl_in_the_reward_is_of_the_policy_that_sampled(runs):
    rows = finished(runs, "reward", "algo.advantage=gae", "algo.kl.where=reward", "algo.kl.coef=0.1")
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[1]["train/kl"]) > 1e-4
    assert rows[1]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_several_optimizer_steps_on_one_rollout_move_the_ratio_and_clip(runs):
    rows = finished(runs, "several", "data.global_batch_size=64")
    for row in rows:
        assert row["train/optimizer_steps"] == 4
        assert row["train/clip_frac_low"] + row["train/clip_frac_high"] > 0
        assert row["train/ess"] < 1
        # What the engine drew from is what the trainer scored before its first step.
        assert row["mismatch/abs_diff_max"] == 0.0
    assert [row["weight_version"] for row in rows] == [1, 2, 3]


def test_two_ranks_balanced_by_flops_train_the_same_first_step_as_one(runs):
    options = ("data.balance=flops", "train.parallel.dp=2", "data.layout=thd", "data.max_tokens_per_gpu=128")
    two, one = finished(runs, "two", *options)[0], finished(runs, "one")[0]
    assert two["data/balance_max_over_mean"] == pytest.approx(1.0, abs=0.02)
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)


OWN = """
import numpy as np
import torch
from miles.algos.advantages import declares


@declares(groups=True)
def against_the_mean(inputs):
    out = np.zeros_like(inputs.rewards)
    for group in np.unique(inputs.group_index):
        members = (inputs.group_index == group) & inputs.in_baseline
        out[members] = inputs.rewards[members] - inputs.rewards[members].mean()
    return inputs.per_token(out)


@declares(reads=("eps_clip",))
def clipped(inputs):
    ratio = inputs.log_ratio().exp()
    bounded = ratio.clamp(inputs.low, inputs.high)
    return torch.maximum(-ratio * inputs.advantages, -bounded * inputs.advantages)


def broken(inputs):
    return inputs.log_probs / inputs.no_such_field
"""


def test_an_advantage_and_a_loss_of_ones_own_train_as_the_built_in_ones_they_repeat(runs, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    names = (f"algo.advantage=python:{path}:against_the_mean", f"algo.loss=python:{path}:clipped")
    own = finished(runs, "own", *names)
    built_in = finished(runs, "built_in", "algo.normalize_std=false")
    for mine, theirs in zip(own, built_in, strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9)
    failed = runs.run("broken", *SHORT, f"algo.loss=python:{path}:broken")
    assert failed.returncode == 2
    assert f"algo.loss: python:{path}:broken raised AttributeError" in failed.stderr
    assert 'own.py", line' in failed.stderr


def test_an_engine_of_another_dtype_is_told_with_the_measured_gap(runs):
    done = runs.run("dtypes", *SHORT, "engine.dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    row = runs.rows("dtypes")[0]
    assert row["mismatch/abs_diff_mean"] > 1e-5
    said = " ".join((done.stdout + done.stderr).split())
    assert "[DTYPE] train.precision is fp32 but engine.dtype is bfloat16" in said
    assert f"differ by {row['mismatch/abs_diff_mean']:.2g} on average" in said
    assert said.count("on average and") == 1
