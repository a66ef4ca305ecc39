"""ppo_clip with a bound on the loss of negative advantages."""

from __future__ import annotations

import torch

from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ppo_clip import ppo_clip


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


def loss(inputs: LossInputs) -> PolicyLoss:
    c = inputs.config.dual_clip_c
    assert c is not None  # the configuration refuses dual_clip without it
    return dual_clip(
        inputs.log_probs, inputs.old, inputs.advantages, inputs.mask, low=inputs.low, high=inputs.high, c=c
    )
