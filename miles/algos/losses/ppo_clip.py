"""PPO's clipped surrogate, with its own upper bound for clip-higher."""

from __future__ import annotations

import torch

from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ratio import log_ratio


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> PolicyLoss:
    """max(-r·A, -clip(r, low, high)·A) of given ratios."""
    clipped = ratio.clamp(low, high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    plain = ratio.detach()
    # A token is clipped when the bound, not the ratio, is the active side of the maximum.
    return PolicyLoss(loss, plain, (plain < low) & (advantages < 0), (plain > high) & (advantages > 0))


def ppo_clip(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> PolicyLoss:
    """max(-r·A, -clip(r, low, high)·A) (Schulman et al. 2017; high > 2 - low is clip-higher, DAPO)."""
    return clipped_surrogate(log_ratio(log_probs, old, mask).exp(), advantages, low, high)


def loss(inputs: LossInputs) -> PolicyLoss:
    return ppo_clip(inputs.log_probs, inputs.old, inputs.advantages, inputs.mask, low=inputs.low, high=inputs.high)
