"""Off-policy corrections between the engine that sampled and the trainer that scores.

Weights w = exp(old - rollout log-probs) at token, sequence (masked sum) or geometric (masked mean) level:
truncate = TIS, clip, mask = IcePop; with rejection and veto, MIS. And OPSM, which masks sequences that moved
away from their samples. All detached; masks and denominators never change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.algos.config import CorrectionConfig
from miles.algos.losses import LOG_RATIO_CLAMP, masked
from miles.algos.sequences import Sequences


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """`weights` [n] multiplies the policy term; `raw` [n] is w before truncation and rejection; `rejected` bool [n]."""

    weights: torch.Tensor
    raw: torch.Tensor
    rejected: torch.Tensor


def level_weights(difference: torch.Tensor, mask: torch.Tensor, level: str, sequences: Sequences) -> torch.Tensor:
    """exp of the clamped log-weight at `level`, spread to tokens [n]. `difference` is 0 at masked tokens."""
    if level == "token":
        return difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    if level == "sequence":
        per_sequence = sequences.total(difference, "sequence log-weights")
    elif level == "geometric":
        per_sequence = sequences.mean(difference, mask, "geometric log-weights")
    else:
        raise ValueError(f"unknown correction level {level!r}; choose token, sequence or geometric")
    return per_sequence.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()[sequences.index]


@torch.no_grad()
def importance_weights(
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    config: CorrectionConfig,
) -> ImportanceWeights:
    """Weights [n] from old (trainer) and rollout (engine) log-probs; 1 where nothing is configured."""
    difference = masked(old - rollout, mask)
    raw = level_weights(difference, mask, config.level, sequences)
    rejected = torch.zeros_like(mask)
    if config.mode == "none":
        weights = torch.ones_like(raw)
    elif config.mode == "truncate":
        weights = raw.clamp(max=config.hi)
    elif config.mode == "clip":
        weights = raw.clamp(config.low, config.hi)
    elif config.mode == "mask":
        rejected = (raw < config.low) | (raw > config.hi)
        weights = raw
    else:
        raise ValueError(f"unknown correction mode {config.mode!r}; choose none, truncate, clip or mask")
    if config.reject is not None:
        judged = level_weights(difference, mask, config.reject.level, sequences)
        rejected = rejected | (judged < config.reject.low) | (judged > config.reject.hi)
    if config.veto is not None:
        token = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        hits = (mask & (token < config.veto)).to(torch.float32)
        rejected = rejected | (sequences.total(hits, "veto counts") > 0)[sequences.index]
    rejected = rejected & mask
    return ImportanceWeights(masked(weights, mask & ~rejected), raw, rejected)


@torch.no_grad()
def opsm_mask(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    *,
    delta: float,
) -> torch.Tensor:
    """bool [n], True where kept: drops A < 0 in sequences with sum m·(old - logp) / max(sum m, 1) > delta."""
    moved = sequences.mean(masked(old - log_probs, mask), mask, "OPSM differences")
    return ~((advantages < 0) & (moved > delta)[sequences.index])
