"""The megatron backend on one GPU against itself on the CPU: dense and experts, fp32 and bf16, checkpoint round trip."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from ci.declare import register_cuda_ci

register_cuda_ci(est_time=120, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["megatron"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WORKER = """
import json, sys
from pathlib import Path
import numpy as np
from miles.algos.config import AlgoConfig
from miles.algos.estimate import prepare_steps
from miles.data.sample import Sample, Status
from miles.data.schedule import ScheduleConfig
from miles.train.config import OptimizerConfig, TrainConfig
from miles.train.megatron.backend import MegatronBackend

model, device, precision, run = sys.argv[1:]
backend = MegatronBackend(
    config=TrainConfig(device=device, precision=precision, optimizer=OptimizerConfig(lr=1e-3)), algo=AlgoConfig(),
    model_dir=Path(model), rank=0, world_size=1, master_addr="127.0.0.1", master_port=0, seed=0)
backend.init()
backend.load()
generator = np.random.default_rng(0)
samples = []
for index in range(32):
    before, after = int(generator.integers(1, 20)), int(generator.integers(1, 40))
    samples.append(Sample(f"s{index}", index // 4, index, generator.integers(0, 15, before + after), before,
        reward=float(generator.random()), status=Status.COMPLETED,
        old_log_probs=-generator.uniform(0.5, 4.0, after).astype(np.float32)))
batch = prepare_steps(samples, AlgoConfig(), ScheduleConfig(layout="thd", max_tokens_per_gpu=512)).steps[0].for_rank(0)
scores = np.concatenate(backend.logprobs(batch))
curve = [backend.step(batch) for _ in range(2)]
backend.save(Path(run), extra={"step": 2})
again = backend.step(batch)
backend.load_checkpoint(Path(run))
repeated = backend.step(batch)
print(json.dumps({"scores": scores.tolist(), "curve": curve, "again": again, "repeated": repeated}))
"""


def worker(model, device, precision, run) -> dict:
    command = [sys.executable, "-c", WORKER, str(model), device, precision, str(run)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request, tmp_path_factory):
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    folder = tmp_path_factory.mktemp(request.param)
    build_char_tokenizer("0123456789=+-", folder / "tokenizer")
    return create_checkpoint(
        folder / "model",
        family=request.param,
        shape=ModelShape(init_std=0.1),
        tokenizer_dir=folder / "tokenizer",
        seed=0,
    )


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    return worker(model, "cpu", "fp32", tmp_path_factory.mktemp("cpu"))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
def test_step_equals_the_cpu_step(precision, tolerance, model, expected, tmp_path):
    got = worker(model, "cuda", precision, tmp_path)
    # The mean: in bf16 a token whose experts are nearly tied may be routed differently.
    difference = torch.tensor(got["scores"]) - torch.tensor(expected["scores"])
    assert difference.abs().mean() <= tolerance
    for mine, theirs in zip(got["curve"], expected["curve"], strict=True):
        for key in ("train/loss", "train/grad_norm", "train/entropy"):
            assert mine[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance), key


def test_resumed_step_equals_the_uninterrupted_one(model, tmp_path):
    got = worker(model, "cuda", "bf16", tmp_path)
    for key in ("train/loss", "train/grad_norm"):
        assert got["repeated"][key] == pytest.approx(got["again"][key], rel=1e-5), key
