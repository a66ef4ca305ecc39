from __future__ import annotations

import re
import time

import pytest
import torch

from miles.algos.collectives import all_reduce, all_reduce_sum, group_rank, group_size


def test_no_group_is_the_identity():
    values = torch.ones(3)
    assert all_reduce(values, group=None, name="x") is values
    assert all_reduce_sum(values, group=None, name="x") is values
    assert (group_size(None), group_rank(None)) == (1, 0)


def test_the_backward_sums_over_ranks_too(gloo_ranks):
    """L = sum over ranks of (r+1)·total: each rank's input moves every rank's loss."""

    def work(rank: int):
        import torch.distributed as dist

        values = torch.tensor([float(rank)], requires_grad=True)
        total = all_reduce_sum(values, group=dist.group.WORLD, name="x")
        (grad,) = torch.autograd.grad(((rank + 1) * total).sum(), values)
        return total.item(), grad.item()

    assert gloo_ranks(2, work) == [(1.0, 3.0), (1.0, 3.0)]


def test_a_rank_that_stays_away_is_reported_within_the_bound(gloo_ranks):
    def work(rank: int):
        import torch.distributed as dist

        if rank == 1:
            time.sleep(2.0)
            return None
        started = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            all_reduce(torch.zeros(3), group=dist.group.WORLD, name="whitening sums", timeout_s=0.5)
        return str(error.value), time.monotonic() - started

    message, waited = gloo_ranks(2, work)[0]
    assert re.search(r"all-reduce of whitening sums \[3\] failed on rank 0 within 0\.5 s", message)
    assert waited < 2.0
