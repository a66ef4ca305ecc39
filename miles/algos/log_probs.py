"""Log-probs of given tokens and entropies from logits that may be split over tensor-parallel ranks.

logits [n, V/tp]: rank r of `group` holds columns r·V/tp and up; columns >= vocab_size are padding and excluded.
Two collectives a call whatever the number of rows (one MAX, one SUM). The backward recomputes the softmax:
besides the gradient, memory is bounded by `chunk_rows` rows in fp32 (CPU) or nothing (CUDA kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from miles.algos.collectives import all_reduce, group_rank, group_size
from miles.kernels.log_probs import logits_gradient, row_stats

DEFAULT_CHUNK_ROWS = 1024


def vocab_parallel_scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    rows: torch.Tensor | None = None,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    entropy: str = "none",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs, entropy or None) in one pass; `entropy` is none, value (no gradient) or gradient.

    rows: int64 [n], distinct: which rows of logits [T, V/tp] the n targets belong to. It saves the copy, and its
    gradient, of picking those rows first; None when n = T and they are in order. log-probs: fp32 [n], with gradient.
    `temperature` must be the rollout's. entropy: fp32 [n], lse - sum p·z over the full vocabulary.

    `ValueError`: temperature not above 0, a target outside the vocabulary (its index is named).
    """
    check_temperature(temperature)
    refuse_outside = target_check(targets, vocab_size)
    start = group_rank(group) * logits.shape[1]
    valid = min(max(vocab_size - start, 0), logits.shape[1])
    if group_size(group) * logits.shape[1] < vocab_size:
        raise ValueError(
            f"logits: {group_size(group)} shards of {logits.shape[1]} columns hold no vocabulary of {vocab_size}"
        )
    log_probs, full = _Scores.apply(logits, targets, rows, group, start, valid, temperature, chunk_rows, entropy)
    refuse_outside()
    return log_probs, None if entropy == "none" else full


def check_temperature(temperature: float) -> None:
    if not temperature > 0.0:
        raise ValueError(
            f"temperature is {temperature}: greedy sampling has no log-probs to train on; sample with a temperature "
            "above 0 and score with the same one"
        )


def target_check(targets: torch.Tensor, vocab_size: int) -> Callable[[], None]:
    """Start looking for ids outside the vocabulary; the returned call raises `ValueError` with the first index.

    On a GPU the answer travels while the caller's next kernels are queued: the device never waits for the host.
    """
    if targets.numel() == 0:
        return lambda: None
    extremes = torch.stack(torch.aminmax(targets))
    arrived: torch.cuda.Event | None = None
    if extremes.is_cuda:
        pinned = torch.empty(2, dtype=extremes.dtype, pin_memory=True)
        extremes = pinned.copy_(extremes, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def refuse_outside() -> None:
        if arrived is not None:
            arrived.synchronize()
        low, high = extremes.tolist()
        if low < 0 or high >= vocab_size:
            at = int(((targets < 0) | (targets >= vocab_size)).nonzero()[0])
            raise ValueError(
                f"target {int(targets[at])} at index {at} is outside the vocabulary of {vocab_size} tokens"
            )

    return refuse_outside


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        start: int,
        valid: int,
        temperature: float,
        chunk_rows: int,
        entropy: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with_entropy = entropy != "none"
        stats = row_stats(
            logits,
            targets,
            rows=rows,
            offset=start,
            valid=valid,
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_rows=chunk_rows,
        )
        parts = [stats.total, stats.target] if stats.weighted is None else [stats.total, stats.target, stats.weighted]
        maximum = stats.maximum
        if group_size(group) > 1:
            maximum = all_reduce(maximum.clone(), group=group, name="logit maxima", op=dist.ReduceOp.MAX)
            # A shard without a valid column has maximum -inf: its sums are 0 and its factor exp(-inf) = 0.
            factor = (stats.maximum - maximum).exp()
            parts[0] = parts[0] * factor
            if with_entropy:
                parts[2] = parts[2] * factor
            parts = list(all_reduce(torch.stack(parts), group=group, name="softmax sums").unbind())
        lse = maximum + parts[0].log()
        log_probs = parts[1] - lse
        full = lse - parts[2] / parts[0] if with_entropy else torch.zeros_like(lse)
        ctx.save_for_backward(logits, targets, lse, full)
        ctx.options = (rows, start, valid, temperature, chunk_rows, entropy)
        if entropy != "gradient":
            ctx.mark_non_differentiable(full)
        return log_probs, full

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        logits, targets, lse, full = ctx.saved_tensors
        rows, start, valid, temperature, chunk_rows, entropy = ctx.options
        grad = logits_gradient(
            logits,
            targets,
            lse,
            grad_log_probs,
            rows=rows,
            offset=start,
            entropy=full if entropy == "gradient" else None,
            grad_entropy=grad_entropy if entropy == "gradient" else None,
            valid=valid,
            temperature=temperature,
            chunk_rows=chunk_rows,
        )
        return (grad, *(None,) * 8)
