"""The megatron backend on one GPU against itself on the CPU: dense and experts, fp32 and bf16, checkpoint round trip."""

from __future__ import annotations

import pytest
import torch

from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=35, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["megatron"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FAMILIES = ("qwen3", "qwen3_moe")
RUNS = [
    (family, device, precision)
    for family in FAMILIES
    for device, precision in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16"))
]


@pytest.fixture(scope="module")
def runs(models, start_ranks, tmp_path_factory) -> dict[tuple[str, str, str], dict]:
    """Every model on every device in every precision, all at once: most of a run's time is its start."""
    ranks = start_ranks(
        [
            {
                "model": str(models[family]),
                "device": device,
                "precision": precision,
                "resume_in": str(tmp_path_factory.mktemp("run")),
            }
            for family, device, precision in RUNS
        ]
    )
    return dict(zip(RUNS, ranks.results(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
def test_step_equals_the_cpu_step(precision, tolerance, family, runs):
    got, expected = runs[family, "cuda", precision], runs[family, "cpu", "fp32"]
    # The mean: in bf16 a token whose experts are nearly tied may be routed differently.
    difference = torch.tensor(got["scores"]) - torch.tensor(expected["scores"])
    assert difference.abs().mean() <= tolerance
    for mine, theirs in zip(got["curve"], expected["curve"], strict=True):
        for key in ("train/loss", "train/grad_norm", "train/entropy"):
            assert mine[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_step_equals_the_uninterrupted_one(family, runs):
    got = runs[family, "cuda", "bf16"]
    for key in ("train/loss", "train/grad_norm"):
        assert got["repeated"][key] == pytest.approx(got["again"][key], rel=1e-5), key
    assert got["again"]["train/loss"] != got["curve"][0]["train/loss"], "a step that changes nothing proves nothing"
