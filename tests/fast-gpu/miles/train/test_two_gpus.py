"""The megatron backend on two GPUs over NCCL against one GPU: tensor and data parallel, dense and experts, fp32.

Tolerance: 1e-4 relative on loss and gradient norm of the first step, where only the order of fp32 sums differs;
1e-3 on those of the second, which starts from weights that Adam moved: it divides by the root of tiny second moments.
"""

from __future__ import annotations

import socket

import pytest
import torch

from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=40, suite="stage-b-2-gpu-h200", hardware=["h200"], num_gpus=2, labels=["megatron"])

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

MESHES = {"tp2": {"tp": 2}, "tp2_sp": {"tp": 2, "sp": True}, "dp2": {"dp": 2}, "ep2": {"dp": 2, "ep": 2}}
CASES = [
    *(("qwen3", mesh) for mesh in ("tp2", "tp2_sp", "dp2")),
    *(("qwen3_moe", mesh) for mesh in ("tp2_sp", "dp2", "ep2")),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def runs(models, start_ranks) -> dict[tuple[str, str], list[dict]]:
    """Results of all ranks by model and mesh ("one" is a single GPU), all meshes at once on the same two GPUs."""
    started = {}
    for family, mesh in [(family, "one") for family in models] + CASES:
        words = {"model": str(models[family]), "device": "cuda", "precision": "fp32", "port": free_port()}
        words |= MESHES.get(mesh, {})
        started[family, mesh] = start_ranks([words | {"rank": rank} for rank in range(1 if mesh == "one" else 2)])
    return {key: ranks.results() for key, ranks in started.items()}


@pytest.mark.parametrize(("family", "mesh"), CASES, ids=lambda value: value)
def test_step_on_two_gpus_equals_the_step_on_one(family, mesh, runs):
    (single,), ranks = runs[family, "one"], runs[family, mesh]
    assert ranks[0]["curve"] == ranks[1]["curve"], "metrics differ between ranks"
    assert abs(single["curve"][0]["train/loss"]) > 1e-3, "a loss near zero would prove nothing"
    for step, tolerance in enumerate((1e-4, 1e-3)):
        for key in ("train/loss", "train/grad_norm", "train/entropy"):
            mine, expected = ranks[0]["curve"][step][key], single["curve"][step][key]
            print(f"{family} {mesh} step {step} {key}: {mine:.8g} against {expected:.8g}")
            assert mine == pytest.approx(expected, rel=tolerance, abs=1e-6), (step, key)


def test_log_probs_under_tensor_parallelism_equal_those_of_one_gpu(runs):
    (single,), ranks = runs["qwen3", "one"], runs["qwen3", "tp2"]
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["scores"]), torch.tensor(single["scores"]), rtol=1e-4, atol=1e-4)
