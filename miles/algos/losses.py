"""Per-token policy, value and supervised losses on flat [n] tensors, and their reduction.

ratio r = exp(clamp(logp - logp_old, +-20)); masked positions are replaced by 0 before exp, so that neither
value nor gradient can be NaN there. All inputs fp32; `mask` is bool [n].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from miles.algos.collectives import all_reduce_sum, segment_sum
from miles.algos.config import AlgoConfig

if TYPE_CHECKING:
    import torch.distributed as dist

LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each of the n tokens belongs to: `index` int64 [n] ascending, `lengths` int64 [S] its runs.

    With context parallelism a sequence's tokens are spread over `cp_group`; sums over a sequence are reduced there.
    """

    index: torch.Tensor
    lengths: torch.Tensor
    cp_group: dist.ProcessGroup | None = None

    def total(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Sum per sequence [S], over all context-parallel ranks; differentiable."""
        return all_reduce_sum(segment_sum(values, self.lengths), group=self.cp_group, name=name)

    def active(self, mask: torch.Tensor) -> torch.Tensor:
        """Active tokens per sequence, fp32 [S]."""
        return self.total(mask.to(torch.float32), "active token counts")

    def mean(self, values: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
        """Masked mean per sequence [S]; 0 where no token is active. `values` must be 0 at masked tokens."""
        return self.total(values, name) / self.active(mask).clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` [n] with gradient; `ratio`, `clipped_low`, `clipped_high` [n] detached, for metrics."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where active, else exactly 0 (no NaN from the masked side, no gradient to it)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio(log_probs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return masked(log_probs - old, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> PolicyLoss:
    clipped = ratio.clamp(low, high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    plain = ratio.detach()
    # A token is clipped when the bound, not the ratio, is the active side of the maximum.
    return PolicyLoss(loss, plain, (plain < low) & (advantages < 0), (plain > high) & (advantages > 0))


def ppo_clip(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> PolicyLoss:
    """max(-r·A, -clip(r, low, high)·A) (Schulman et al. 2017; high > 2 - low is clip-higher, DAPO)."""
    return _clipped(log_ratio(log_probs, old, mask).exp(), advantages, low, high)


def dual_clip(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
    c: float,
) -> PolicyLoss:
    """ppo_clip, and for A < 0 at most -c·A (Ye et al. 2020). c must be above 1."""
    if c <= 1.0:
        raise ValueError(f"dual_clip: c is {c}, expected a value above 1 (usually 3)")
    base = ppo_clip(log_probs, old, advantages, mask, low=low, high=high)
    bounded = torch.where(advantages < 0, torch.minimum(base.loss, -c * advantages), base.loss)
    return PolicyLoss(bounded, base.ratio, base.clipped_low, base.clipped_high | ((base.ratio > c) & (advantages < 0)))


def gspo(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    *,
    low: float,
    high: float,
) -> PolicyLoss:
    """ppo_clip with the sequence's geometric-mean ratio s = exp(sum m·(logp - old) / max(sum m, 1)) (GSPO)."""
    mean = sequences.mean(masked(log_probs - old, mask), mask, "GSPO log-ratio sums")
    ratio = mean.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()[sequences.index]
    return _clipped(ratio, advantages, low, high)


def cispo(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> PolicyLoss:
    """-sg(clip(r, low, high))·A·logp: the gradient goes through logp only (MiniMax-M1)."""
    ratio = log_ratio(log_probs, old, mask).detach().exp()
    loss = -ratio.clamp(low, high) * advantages * masked(log_probs, mask)
    return PolicyLoss(loss, ratio, ratio < low, ratio > high)


def sft_loss(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-logp of each active token [n]."""
    return -masked(log_probs, mask)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """0.5·max((V-G)^2, (clip(V, V_old-eps, V_old+eps) - G)^2) per token [n]."""
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    clipped = torch.minimum(torch.maximum(values, old_values - eps), old_values + eps)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def policy_loss(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    config: AlgoConfig,
) -> PolicyLoss:
    """The loss that `config.loss` names. Advantages at masked tokens do not matter."""
    low, high = 1.0 - config.eps_clip, 1.0 + config.clip_high
    advantages = masked(advantages, mask)
    if config.loss == "gspo":
        return gspo(log_probs, old, advantages, mask, sequences, low=low, high=high)
    if config.loss == "sft":
        ones, never = torch.ones_like(log_probs), torch.zeros_like(mask)
        return PolicyLoss(sft_loss(log_probs, mask), ones.detach(), never, never)
    token_losses: dict[str, Callable[..., PolicyLoss]] = {"ppo_clip": ppo_clip, "dual_clip": dual_clip, "cispo": cispo}
    if config.loss not in token_losses:
        raise ValueError(f"unknown loss {config.loss!r}; choose one of {', '.join([*token_losses, 'gspo', 'sft'])}")
    extra = {"c": config.dual_clip_c} if config.loss == "dual_clip" else {}
    return token_losses[config.loss](log_probs, old, advantages, mask, low=low, high=high, **extra)


def reduce_loss(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum of values x weights; the weights (`miles.data.batch.Denominators`) carry mask and denominator.

    A weight of 0 removes a token even when its value is not finite.
    """
    return (masked(values, weights != 0) * weights).sum()
