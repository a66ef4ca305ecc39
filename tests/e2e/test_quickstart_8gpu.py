"""The quickstart recipe on eight GPUs: tensor, pipeline and context parallel training at once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=900, suite="stage-c-8-gpu-h200", hardware=["h200"], num_gpus=8, labels=["megatron", "short"])

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = {"tp": 2, "pp": 2, "cp": 2, "dp": 1}


def test_three_steps_train_and_export(tmp_path: Path) -> None:
    sets = [f"train.parallel.{axis}={size}" for axis, size in PARALLEL.items()]
    sets += ["name=layout", f"run.directory={tmp_path}", "run.steps=3", "eval.sets=[]", "expect={}"]
    command = [sys.executable, "-m", "miles.cli", "train", "recipes/quickstart.yaml"]
    done = subprocess.run(
        [*command, *(word for text in sets for word in ("--set", text))], cwd=ROOT, check=False, text=True
    )
    assert done.returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "layout/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows)
    assert (tmp_path / "layout/hf_model/model.safetensors").exists()
