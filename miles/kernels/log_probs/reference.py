"""Plain-torch reference of the log-prob kernels, chunked by rows. Runs on every device; the CPU's only path.

z = logits / temperature in fp32 over the first `valid` columns; columns beyond are vocabulary padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

LossName = Literal["ppo_clip", "dual_clip", "cispo"]
LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, slots=True)
class RowStats:
    """fp32 [n] each, of one shard: max z, sum exp(z - max), z at the target (0 when it is elsewhere), and
    sum exp(z - max)·z when asked for. A shard without a valid column has max = -inf and zeros.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor
    weighted: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """Per-row constants of a token-level policy loss: fp32 [n] each; `old` None is on-policy (ratio 1).

    The loss is sum of weights x loss(logp); weights carry mask and denominator. Formulas: `miles.algos.losses`.
    """

    advantages: torch.Tensor
    weights: torch.Tensor
    old: torch.Tensor | None = None
    loss: LossName = "ppo_clip"
    low: float = 0.8
    high: float = 1.2
    dual_c: float = 3.0


class FusedRows(NamedTuple):
    """fp32 [n] each: loss x weight, log-prob and, when asked for, the full softmax's entropy (no gradient).

    `grad` [T, V] in the logits' dtype: of the sum of the losses with respect to the logits, 0 in rows without a target.
    """

    losses: torch.Tensor
    log_probs: torch.Tensor
    grad: torch.Tensor
    entropy: torch.Tensor | None


def reference_row_stats(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows: torch.Tensor | None,
    offset: int,
    valid: int,
    temperature: float,
    with_entropy: bool,
    chunk_rows: int,
) -> RowStats:
    """See `RowStats`. targets: int64 [n], ids; this shard holds ids `offset` to `offset + valid - 1`.

    rows: int64 [n], the logit row of each target, or None when they are in order.
    """
    n = len(targets)
    columns = local_columns(targets, offset, valid)
    out = torch.empty((4 if with_entropy else 3, n), dtype=torch.float32, device=logits.device)
    if valid == 0:
        out.zero_()
        out[0] = -torch.inf
    for start in range(0, n if valid else 0, chunk_rows):
        part = slice(start, start + chunk_rows)
        z = _scaled(logits[part if rows is None else rows[part], :valid], temperature)
        maximum = z.amax(dim=-1)
        at = columns[part]
        picked = z.gather(1, at.clamp(min=0)[:, None])[:, 0]
        out[0, part] = maximum
        out[2, part] = torch.where(at >= 0, picked, 0.0)
        shift = torch.where(torch.isfinite(maximum), maximum, 0.0)
        if with_entropy:
            e = (z - shift[:, None]).exp_()
            out[1, part] = e.sum(dim=-1)
            # exp(-inf)·(-inf) would be NaN: a forbidden token adds nothing to the entropy.
            out[3, part] = e.mul_(z.clamp_(min=torch.finfo(torch.float32).min)).sum(dim=-1)
        else:
            out[1, part] = z.sub_(shift[:, None]).exp_().sum(dim=-1)
    return RowStats(out[0], out[1], out[2], out[3] if with_entropy else None)


def row_log_softmax(z: torch.Tensor) -> torch.Tensor:
    """log_softmax of fp32 rows by the sums of `reference_row_stats`: equal to the trainer's log-probs bit for bit."""
    maximum = z.amax(dim=-1, keepdim=True)
    return z - (maximum + (z - maximum).exp_().sum(dim=-1, keepdim=True).log())


def local_columns(targets: torch.Tensor, offset: int, valid: int) -> torch.Tensor:
    """Column of each target in this shard, -1 where it lives elsewhere."""
    return torch.where((targets >= offset) & (targets < offset + valid), targets - offset, -1)


def reference_logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    grad_log_probs: torch.Tensor,
    *,
    rows: torch.Tensor | None,
    offset: int,
    entropy: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    valid: int,
    temperature: float,
    chunk_rows: int,
) -> torch.Tensor:
    """d/dlogits of logp and, when given, of the entropy, in the dtype of `logits`; 0 in padded columns.

    dlogp/dz_j = [j = target] - p_j; dH/dz_j = -p_j (log p_j + H).
    """
    grad = torch.zeros_like(logits)
    columns = local_columns(targets, offset, valid)
    for start in range(0, len(targets) if valid else 0, chunk_rows):
        part = slice(start, start + chunk_rows)
        where = part if rows is None else rows[part]
        log_p = _scaled(logits[where, :valid], temperature).sub_(lse[part, None])
        p = log_p.exp()
        out = p * -grad_log_probs[part, None]
        if entropy is not None and grad_entropy is not None:
            term = log_p.clamp_(min=torch.finfo(torch.float32).min).add_(entropy[part, None])
            out -= p.mul_(term).mul_(grad_entropy[part, None])
        at = columns[part]
        here = torch.where(at >= 0, grad_log_probs[part], 0.0)
        out.scatter_add_(1, at.clamp(min=0)[:, None], here[:, None])
        grad[where, :valid] = out.div_(temperature).to(grad.dtype)
    return grad


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """An fp32 copy: the caller may write to it."""
    z = logits.to(torch.float32, copy=True)
    return z if temperature == 1.0 else z.div_(temperature)


def policy_term_loss(log_probs: torch.Tensor, term: PolicyTerm) -> torch.Tensor:
    """The per-row loss x weight [n] with gradient: what the fused kernel computes on the fly."""
    active = term.weights != 0
    old = log_probs.detach() if term.old is None else term.old
    zero = torch.zeros_like(log_probs)
    ratio = torch.where(active, log_probs - old, zero).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    clipped = ratio.clamp(term.low, term.high)
    if term.loss == "cispo":
        loss = -clipped.detach() * term.advantages * torch.where(active, log_probs, zero)
    else:
        loss = torch.maximum(-ratio * term.advantages, -clipped * term.advantages)
        if term.loss == "dual_clip":
            loss = torch.where(term.advantages < 0, torch.minimum(loss, -term.dual_c * term.advantages), loss)
    return loss * term.weights


def reference_fused_policy_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    term: PolicyTerm,
    *,
    rows: torch.Tensor | None,
    valid: int,
    temperature: float,
    chunk_rows: int,
    with_entropy: bool = False,
) -> FusedRows:
    """See `FusedRows`."""
    stats = reference_row_stats(
        logits,
        targets,
        rows=rows,
        offset=0,
        valid=valid,
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_rows=chunk_rows,
    )
    lse = stats.maximum + stats.total.log()
    log_probs = (stats.target - lse).requires_grad_(True)
    with torch.enable_grad():
        losses = policy_term_loss(log_probs, term)
        (slope,) = torch.autograd.grad(losses.sum(), log_probs)
    grad = reference_logits_gradient(
        logits,
        targets,
        lse,
        slope,
        rows=rows,
        offset=0,
        entropy=None,
        grad_entropy=None,
        valid=valid,
        temperature=temperature,
        chunk_rows=chunk_rows,
    )
    entropy = lse - stats.weighted / stats.total if stats.weighted is not None else None
    return FusedRows(losses.detach(), log_probs.detach(), grad, entropy)
