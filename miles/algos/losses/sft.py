"""Supervised fine-tuning: the likelihood of given answers."""

from __future__ import annotations

import torch

from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ratio import masked


def sft(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-logp of each active token [n]."""
    return -masked(log_probs, mask)


def loss(inputs: LossInputs) -> PolicyLoss:
    ones, never = torch.ones_like(inputs.log_probs), torch.zeros_like(inputs.mask)
    return PolicyLoss(sft(inputs.log_probs, inputs.mask), ones.detach(), never, never)
