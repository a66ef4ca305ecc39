"""Vocabulary-parallel log-probs over NCCL on two GPUs equal one GPU (the same is pinned over gloo on the CPU)."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles.algos.log_probs import vocab_parallel_scores
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=20, suite="stage-b-2-gpu-h200", hardware=["h200"], num_gpus=2, labels=["kernels"])

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
ROWS, VOCAB = 128, 151_936


def shard_work(rank: int, port: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, VOCAB) * 3).bfloat16()
    targets = torch.randint(0, VOCAB, (ROWS,))
    half = VOCAB // 2
    shard = logits[:, rank * half : (rank + 1) * half].cuda().requires_grad_(True)
    scores = vocab_parallel_scores(
        shard, targets.cuda(), vocab_size=VOCAB, group=dist.group.WORLD, temperature=0.9, entropy="gradient"
    )
    (grad,) = torch.autograd.grad(scores[0].sum() + scores[1].sum(), shard)
    torch.save((scores[0].detach().cpu(), scores[1].detach().cpu(), grad.cpu()), f"{folder}/{rank}.pt")
    if rank == 0:
        torch.save((logits, targets), f"{folder}/input.pt")
    dist.destroy_process_group()


def test_two_shards_over_nccl_equal_one_gpu(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(shard_work, args=(port, str(tmp_path)), nprocs=2, join=True)
    logits, targets = torch.load(tmp_path / "input.pt")
    whole = logits.cuda().requires_grad_(True)
    expected = vocab_parallel_scores(whole, targets.cuda(), vocab_size=VOCAB, temperature=0.9, entropy="gradient")
    (grad,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), whole)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for log_probs, entropy, _ in parts:
        torch.testing.assert_close(log_probs, expected[0].detach().cpu(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, expected[1].detach().cpu(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), grad.cpu(), rtol=2e-2, atol=1e-5)
