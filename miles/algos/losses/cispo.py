"""CISPO: a clipped ratio as a constant weight, so that clipped tokens keep their gradient."""

from __future__ import annotations

import torch

from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ratio import log_ratio, masked


def cispo(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> PolicyLoss:
    """-sg(clip(r, low, high))·A·logp: the gradient goes through logp only (MiniMax-M1)."""
    ratio = log_ratio(log_probs, old, mask).detach().exp()
    per_token = -ratio.clamp(low, high) * advantages * masked(log_probs, mask)
    return PolicyLoss(per_token, ratio, ratio < low, ratio > high)


def loss(inputs: LossInputs) -> PolicyLoss:
    return cispo(inputs.log_probs, inputs.old, inputs.advantages, inputs.mask, low=inputs.low, high=inputs.high)
