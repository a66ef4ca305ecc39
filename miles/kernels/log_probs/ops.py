"""Checks and launches: CUDA logits go to Triton, all others to the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from miles.kernels.log_probs.reference import (
    FusedRows,
    PolicyTerm,
    RowStats,
    reference_fused_policy_loss,
    reference_logits_gradient,
    reference_row_stats,
)

_LOSSES = ("ppo_clip", "dual_clip", "cispo")  # numbers of the kernel's constants, in this order


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch shapes, measured on an H200 at V = 151,936 (benchmarks/log_probs.py)."""

    stats_warps: int = 8
    stats_depth: int = 4
    gradient_warps: int = 4
    gradient_block: int = 4096
    fused_warps: int = 32
    fused_depth: int = 4
    fused_programs_per_sm: int = 1


DEFAULT_TUNING = Tuning()


def _uses_triton(logits: torch.Tensor, force: bool | None) -> bool:
    return logits.is_cuda if force is None else force


def _check(logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor | None, valid: int) -> None:
    if logits.ndim != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits: expected [n, V] with contiguous rows, got {list(logits.shape)} {logits.stride()}")
    count = len(logits) if rows is None else len(rows)
    if targets.shape != (count,):
        raise ValueError(f"targets: expected [{count}], got {list(targets.shape)}")
    if not 0 <= valid <= logits.shape[1]:
        raise ValueError(f"valid columns: {valid} of {logits.shape[1]}")


def _slots(rows: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """int64 [count]: which target each logit row belongs to, -1 for none. `rows` are distinct."""
    if rows is None:
        return None
    slots = torch.full((count,), -1, dtype=torch.int64, device=rows.device)
    slots[rows] = torch.arange(len(rows), device=rows.device)
    return slots


def _lanes(warps: int, dtype: torch.dtype) -> int:
    # 16 bytes a thread: every load of a tile is one full vector access.
    return warps * 32 * (16 // dtype.itemsize)


def row_stats(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    valid: int,
    rows: torch.Tensor | None = None,
    offset: int = 0,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_rows: int = 1024,
    triton: bool | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> RowStats:
    """What this shard knows of rows of logits [T, V_local] (fp32, bf16 or fp16); see `RowStats`.

    targets: int64 [n], ids; column j here is id `offset + j`, and `valid` columns belong to the vocabulary.
    rows: int64 [n], distinct: the logit row of each target; None when n = T and they are in order.
    `chunk_rows` bounds the reference's memory only.
    """
    _check(logits, targets, rows, valid)
    if not _uses_triton(logits, triton):
        return reference_row_stats(
            logits,
            targets,
            rows=rows,
            offset=offset,
            valid=valid,
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_rows=chunk_rows,
        )
    from miles.kernels.log_probs.triton_kernels import stats_kernel

    n = len(targets)
    out = torch.empty((4, n), dtype=torch.float32, device=logits.device)
    if n:
        stats_kernel[(n,)](
            logits,
            targets if rows is None else rows,
            targets,
            out[0],
            out[1],
            out[2],
            out[3],
            logits.stride(0),
            offset,
            valid,
            math.log2(math.e) / temperature,
            DEPTH=tuning.stats_depth,
            LANES=_lanes(tuning.stats_warps, logits.dtype),
            ENTROPY=with_entropy,
            PICKED=rows is not None,
            num_warps=tuning.stats_warps,
        )
    return RowStats(out[0], out[1], out[2], out[3] if with_entropy else None)


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    grad_log_probs: torch.Tensor,
    *,
    entropy: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
    valid: int,
    rows: torch.Tensor | None = None,
    offset: int = 0,
    temperature: float = 1.0,
    chunk_rows: int = 1024,
    triton: bool | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> torch.Tensor:
    """Gradient with respect to the logits [T, V_local], same dtype; 0 in rows that no target names. lse, grad_log_probs: fp32 [n], global over shards."""
    _check(logits, targets, rows, valid)
    with_entropy = entropy is not None and grad_entropy is not None
    if not _uses_triton(logits, triton):
        return reference_logits_gradient(
            logits,
            targets,
            lse,
            grad_log_probs,
            rows=rows,
            offset=offset,
            entropy=entropy,
            grad_entropy=grad_entropy,
            valid=valid,
            temperature=temperature,
            chunk_rows=chunk_rows,
        )
    from miles.kernels.log_probs.triton_kernels import gradient_kernel

    n, width = logits.shape
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grad_log_probs = grad_log_probs.contiguous()
    slots = _slots(rows, n)
    if n:
        gradient_kernel[(n * -(-width // tuning.gradient_block),)](
            logits,
            grad,
            targets if slots is None else slots,
            targets,
            lse,
            grad_log_probs,
            entropy if with_entropy else lse,
            grad_entropy.contiguous() if with_entropy and grad_entropy is not None else lse,
            logits.stride(0),
            grad.stride(0),
            offset,
            width,
            valid,
            math.log2(math.e) / temperature,
            1.0 / temperature,
            BLOCK=tuning.gradient_block,
            ENTROPY=with_entropy,
            PICKED=slots is not None,
            num_warps=tuning.gradient_warps,
        )
    return grad


def fused_policy_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    term: PolicyTerm,
    *,
    valid: int,
    rows: torch.Tensor | None = None,
    temperature: float = 1.0,
    inplace: bool = False,
    with_entropy: bool = False,
    chunk_rows: int = 1024,
    triton: bool | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> FusedRows:
    """Losses and their gradient of unsharded logits [T, V], in one visit of each row; see `FusedRows`.

    `inplace` writes the gradient over the logits, which the caller must own and no longer need.
    """
    _check(logits, targets, rows, valid)
    if not _uses_triton(logits, triton):
        found = reference_fused_policy_loss(
            logits,
            targets,
            term,
            rows=rows,
            valid=valid,
            temperature=temperature,
            chunk_rows=chunk_rows,
            with_entropy=with_entropy,
        )
        return found._replace(grad=logits.copy_(found.grad)) if inplace else found
    from miles.kernels.log_probs.triton_kernels import fused_kernel

    n, width = logits.shape
    grad = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    out = torch.empty((3, len(targets)), dtype=torch.float32, device=logits.device)
    slots = _slots(rows, n)
    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 1
    programs = min(n, processors * tuning.fused_programs_per_sm)
    if n:
        fused_kernel[(programs,)](
            logits,
            grad,
            targets if slots is None else slots,
            targets,
            term.advantages if term.old is None else term.old,
            term.advantages,
            term.weights,
            out[0],
            out[1],
            out[2],
            n,
            logits.stride(0),
            grad.stride(0),
            width,
            valid,
            math.log2(math.e) / temperature,
            1.0 / temperature,
            term.low,
            term.high,
            term.dual_c,
            DEPTH=tuning.fused_depth,
            LANES=_lanes(tuning.fused_warps, logits.dtype),
            LOSS=_LOSSES.index(term.loss),
            ON_POLICY=term.old is None,
            ENTROPY=with_entropy,
            PICKED=slots is not None,
            num_warps=tuning.fused_warps,
        )
    return FusedRows(out[0], out[1], grad, out[2] if with_entropy else None)


def scale_(values: torch.Tensor, factor: torch.Tensor, *, triton: bool | None = None) -> torch.Tensor:
    """values *= factor in place; no pass over memory when the scalar `factor` is 1, and no device sync."""
    if not _uses_triton(values, triton):
        return values if float(factor) == 1.0 else values.mul_(factor)
    from miles.kernels.log_probs.triton_kernels import scale_kernel

    if not values.is_contiguous():
        raise ValueError(f"scale_: expected a contiguous tensor, got strides {values.stride()}")
    processors = torch.cuda.get_device_properties(values.device).multi_processor_count if values.is_cuda else 1
    scale_kernel[(processors * 8,)](values, factor.to(torch.float32), values.numel(), BLOCK=4096, num_warps=8)
    return values
