"""Log-probs of given tokens on the sampler's support S_t: log p_S(y) = z_y - log sum_{v in S_t} exp(z_v).

Only the logits at the support's ids are read: O(sum |S_t|) memory, no dense mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from miles.algos.collectives import all_reduce, group_rank, group_size
from miles.algos.log_probs import check_temperature, target_check


def support_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """fp32 [n] with gradient, on the CSR support. logits [n, V/tp]; targets int64 [n]; ids int64 [E]; offsets int64 [n+1].

    A target outside its support has log-prob -inf and ids of padding columns do not count.
    Deterministic: rows are reduced in order, and the backward writes each unique (row, id) once.
    """
    check_temperature(temperature)
    refuse_outside = target_check(targets, vocab_size)
    n = len(logits)
    if len(offsets) != n + 1:
        raise ValueError(f"support: {len(offsets) - 1} rows for {n} logit rows; pass the masks of these tokens")
    counts = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(n, device=logits.device), counts, output_size=len(ids))
    log_probs: torch.Tensor = _Support.apply(logits, targets, ids, rows, offsets, vocab_size, group, temperature)
    refuse_outside()
    return log_probs


class _Support(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ids: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> torch.Tensor:
        n, width = logits.shape
        start = group_rank(group) * width
        local = (ids >= start) & (ids < min(start + width, vocab_size))
        columns = torch.where(local, ids - start, 0)
        z = logits[rows, columns].float() / temperature
        z = torch.where(local, z, -torch.inf)
        if n == 0:
            ctx.save_for_backward(columns, rows, z, local, torch.zeros_like(local))
            ctx.shape, ctx.dtype, ctx.temperature, ctx.sharded = (
                logits.shape,
                logits.dtype,
                temperature,
                group_size(group) > 1,
            )
            return logits.new_zeros(0, dtype=torch.float32)
        chosen = local & (ids == targets[rows])
        # The target's logit is a maximum too: of one value, and -inf where its support does not hold it.
        maxima = torch.stack(
            [
                torch.segment_reduce(z, "max", offsets=offsets),
                torch.segment_reduce(torch.where(chosen, z, -torch.inf), "max", offsets=offsets),
            ]
        )
        if group_size(group) > 1:
            maxima = all_reduce(maxima, group=group, name="support maxima", op=dist.ReduceOp.MAX)
        maximum, target = maxima
        # Ids of other shards are -inf here: exp gives 0, never -inf - -inf, since some shard has a finite maximum.
        sums = torch.segment_reduce((z - maximum[rows]).exp(), "sum", offsets=offsets)
        lse = maximum + all_reduce(sums, group=group, name="support sums").log()
        # p_S of every local id: all that the backward needs besides which of them was sampled.
        p = (z - lse[rows]).exp()
        ctx.save_for_backward(columns, rows, p, local, chosen)
        ctx.shape, ctx.dtype, ctx.temperature, ctx.sharded = (
            logits.shape,
            logits.dtype,
            temperature,
            group_size(group) > 1,
        )
        return target - lse

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor) -> tuple[Any, ...]:
        columns, rows, p, local, chosen = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad_log_probs.device)
        values = (chosen.to(torch.float32) - p) * grad_log_probs[rows] / ctx.temperature
        if ctx.sharded:  # ids of other shards have no column here
            rows, columns, values = rows[local], columns[local], values[local]
        # (row, id) pairs are unique, so no two writes meet.
        grad[rows, columns] = values.to(ctx.dtype)
        return grad, None, None, None, None, None, None, None


def support_log_softmax(
    logits: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log p_S of every id of the support, fp32 [E], with gradient, the same on every rank of `group`.

    What `miles.algos.kl.support_exact` compares between policy and reference.
    """
    check_temperature(temperature)
    n = len(logits)
    if len(offsets) != n + 1:
        raise ValueError(f"support: {len(offsets) - 1} rows for {n} logit rows; pass the masks of these tokens")
    rows = torch.repeat_interleave(torch.arange(n, device=ids.device), offsets.diff(), output_size=len(ids))
    return _SupportSoftmax.apply(logits, ids, rows, offsets, group, temperature)


class _SupportSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> torch.Tensor:
        width = logits.shape[1]
        start = group_rank(group) * width
        local = (ids >= start) & (ids < start + width)
        columns = torch.where(local, ids - start, 0)
        z = torch.where(local, logits[rows, columns].float() / temperature, 0.0)
        # Each id lives on one rank; the sum spreads it to all, and every rank then computes the same result.
        z = all_reduce(z, group=group, name="support logits")
        if len(ids):
            z = z - torch.segment_reduce(z, "max", offsets=offsets)[rows]
            z = z - torch.segment_reduce(z.exp(), "sum", offsets=offsets).log()[rows]
        ctx.save_for_backward(z, columns, rows, local, offsets)
        ctx.shape, ctx.dtype, ctx.temperature = logits.shape, logits.dtype, temperature
        return z

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        log_p, columns, rows, local, offsets = ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        if len(grad):
            # The result is the same on every rank, and so is its gradient: nothing is summed over ranks.
            total = torch.segment_reduce(grad.contiguous(), "sum", offsets=offsets)
            values = (grad - log_p.exp() * total[rows]) / ctx.temperature
            # (row, id) pairs are unique, so no two writes meet.
            out[rows[local], columns[local]] = values[local].to(ctx.dtype)
        return out, None, None, None, None, None
