"""GSPO: the clipped surrogate of the sequence's ratio."""

from __future__ import annotations

import torch

from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ppo_clip import clipped_surrogate
from miles.algos.losses.ratio import LOG_RATIO_CLAMP, masked
from miles.algos.sequences import Sequences


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
    """ppo_clip with the sequence's geometric-mean ratio s = exp(sum m·(logp - old) / max(sum m, 1)) (Zheng et al. 2025)."""
    mean = sequences.mean(masked(log_probs - old, mask), mask, "GSPO log-ratio sums")
    ratio = mean.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()[sequences.index]
    return clipped_surrogate(ratio, advantages, low, high)


def loss(inputs: LossInputs) -> PolicyLoss:
    return gspo(
        inputs.log_probs,
        inputs.old,
        inputs.advantages,
        inputs.mask,
        inputs.sequences,
        low=inputs.low,
        high=inputs.high,
    )
