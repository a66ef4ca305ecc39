"""The quickstart recipe with trainer and engine on one GPU, in turns; and the refusal to have them side by side there."""

from __future__ import annotations

import math

from miles_ci.declare import register_cuda_ci

register_cuda_ci(
    est_time=90, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["megatron", "short"], timeout=300
)

ON_GPU = (
    "train.device=cuda",
    "engine.device=cuda",
    "run.steps=20",
    "eval.sets=[{name: held_out, prompts: 8}]",
    "expect={}",
)


def test_trainer_and_engine_take_turns_on_one_gpu(runs) -> None:
    done = runs.run("together", *ON_GPU, "placement.mode=colocated")
    assert done.returncode == 0, done.stderr
    rows = runs.rows("together")
    assert [row["weight_version"] for row in rows] == list(range(1, 21))
    assert all(math.isfinite(row["train/loss"]) for row in rows)
    # fp32 on both sides, other kernels: a weight that did not arrive would be far off.
    assert max(row["mismatch/abs_diff_mean"] for row in rows) < 1e-3
    assert sum(row["rollout/reward_mean"] for row in rows[-5:]) > sum(row["rollout/reward_mean"] for row in rows[:5])


def test_one_gpu_for_both_at_once_is_refused_with_the_numbers(runs) -> None:
    shown = runs.run("plan", *ON_GPU, "placement.mode=colocated", dry_run=True)
    assert shown.returncode == 0, shown.stderr
    said = " ".join(shown.stdout.replace("│", " ").split())
    assert "trainer rank 0 127.0.0.1 cuda:0 (shared)" in said
    assert "engine 0 127.0.0.1 cuda:0 (shared)" in said
    apart = runs.run("plan", *ON_GPU, dry_run=True)
    assert apart.returncode == 2
    assert "needs 1 GPU for 1 trainer rank + 1 for 1 engine = 2, but 1 node has 1 free" in apart.stderr
