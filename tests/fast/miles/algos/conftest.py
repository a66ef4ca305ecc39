"""Gloo processes forked from this (warm) process, and batches for the objective."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles.data.sample import Sample, Status

torch.set_num_threads(1)  # before any fork: a forked thread pool would hang


def _child(rank: int, world: int, store: Path, work: Callable[[int], Any], results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        # Plain pickle: torch's own queue would hand over shared memory that dies with this process.
        results.put((rank, True, pickle.dumps(work(rank))))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


@pytest.fixture
def gloo_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`gloo_ranks(world, work, limit_s)`: run `work(rank)` on every rank, return results by rank.

    `work` may be a closure (the processes are forked). A rank that fails or hangs fails the test, and none survives.
    """
    runs = iter(range(100))

    def run(world: int, work: Callable[[int], Any], limit_s: float = 20.0) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        store = tmp_path / f"store{next(runs)}"
        ranks = [context.Process(target=_child, args=(r, world, store, work, results)) for r in range(world)]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        deadline = time.monotonic() + limit_s
        try:
            while len(found) < world:
                if time.monotonic() > deadline:
                    pytest.fail(f"ranks {sorted(set(range(world)) - set(found))} still run after {limit_s} s")
                if results.empty():
                    time.sleep(0.005)
                    continue
                rank, fine, value = results.get()
                if not fine:
                    pytest.fail(f"rank {rank} failed:\n{value}")
                found[rank] = pickle.loads(value)
        finally:
            for process in ranks:
                if len(found) < world:
                    process.kill()
                process.join()
        return [found[rank] for rank in range(world)]

    return run


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """Samples of random lengths with all per-token fields, in groups of `group_size`, reproducible by seed."""

    def make(count: int = 6, *, seed: int = 0, vocab: int = 23, group_size: int = 3, longest: int = 9) -> list[Sample]:
        rng = np.random.default_rng(seed)
        samples = []
        for i in range(count):
            prompt, response = int(rng.integers(1, 5)), int(rng.integers(1, longest + 1))
            base = rng.standard_normal(response).astype(np.float32) * 0.3 - 2.0
            samples.append(
                Sample(
                    sample_id=f"s{i}",
                    group_id=i // group_size,
                    rollout_id=i,
                    tokens=rng.integers(0, vocab, prompt + response).astype(np.int64),
                    prompt_length=prompt,
                    loss_mask=(rng.random(response) < 0.8).astype(np.uint8),
                    rollout_log_probs=base,
                    old_log_probs=base + rng.standard_normal(response).astype(np.float32) * 0.1,
                    ref_log_probs=base + rng.standard_normal(response).astype(np.float32) * 0.2,
                    teacher_log_probs=base + rng.standard_normal(response).astype(np.float32) * 0.2,
                    values=rng.standard_normal(response).astype(np.float32),
                    reward=float(np.round(rng.random(), 3)),
                    status=Status.COMPLETED,
                )
            )
        return samples

    return make
