"""The trainer's fused loss on a GPU against its unfused one: the same steps, with and without shared prompts."""

from __future__ import annotations

import pytest
import torch

from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=45, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["megatron", "kernels"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CASES = [(precision, grouped) for precision in ("fp32", "bf16") for grouped in (False, True)]
RUNS = [(*case, fused) for case in CASES for fused in ("on", "auto", "off")]


@pytest.fixture(scope="module")
def runs(models, start_ranks) -> dict[tuple[str, bool, str], dict]:
    ranks = start_ranks(
        [
            {
                "model": str(models["qwen3"]),
                "device": "cuda",
                "precision": precision,
                "grouped": grouped,
                "fused": fused,
            }
            for precision, grouped, fused in RUNS
        ]
    )
    return dict(zip(RUNS, ranks.results(), strict=True))


@pytest.mark.parametrize(("precision", "grouped"), CASES)
def test_fused_steps_equal_unfused_steps(precision, grouped, runs):
    fused, plain = runs[precision, grouped, "on"], runs[precision, grouped, "off"]
    tolerance = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    assert fused["scores"] == pytest.approx(plain["scores"], abs=tolerance)
    for mine, theirs in zip(fused["curve"], plain["curve"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("train/loss", "train/pg_loss", "train/grad_norm", "train/entropy", "train/ratio_mean", "train/ess"):
            assert mine[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance), key
        assert mine["train/grad_norm"] > 1e-3, "a step that has no gradient proves nothing"
    assert fused["curve"][0]["train/loss"] != fused["curve"][1]["train/loss"]


@pytest.mark.parametrize(("precision", "grouped"), CASES)
def test_auto_repeats_the_fused_first_step(precision, grouped, runs):
    auto, fused = runs[precision, grouped, "auto"], runs[precision, grouped, "on"]
    for key in ("train/loss", "train/entropy"):
        assert auto["curve"][0][key] == pytest.approx(fused["curve"][0][key], rel=1e-6), key
