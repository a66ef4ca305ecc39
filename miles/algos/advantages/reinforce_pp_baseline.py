"""REINFORCE++ with the group's mean as baseline."""

from __future__ import annotations

import numpy as np

from miles.algos.advantages.groups import group_baseline
from miles.algos.advantages.inputs import AdvantageInputs, Estimate
from miles.algos.advantages.whiten import whitened


def reinforce_pp_baseline(
    rewards: np.ndarray,
    group_index: np.ndarray,
    in_baseline: np.ndarray,
    rollout_index: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    kl: np.ndarray | None = None,
    beta: float = 0.0,
) -> np.ndarray:
    """A_t = (R - group mean) - beta·kl_t -> float32 [n], not yet whitened (Hu 2025). rewards [M], rollout_index [S]."""
    used, _, means, _ = group_baseline(rewards, group_index, in_baseline)
    centred = np.where(in_baseline, used - means[group_index], 0.0)
    out = np.repeat(centred[rollout_index], lengths)
    if kl is not None and beta != 0.0:
        out = out - beta * kl.astype(np.float64)
    return np.where(mask.astype(bool), out, 0.0).astype(np.float32)


def estimate(inputs: AdvantageInputs) -> Estimate:
    """Whitened over the step."""
    raw = reinforce_pp_baseline(
        inputs.rewards,
        inputs.group_index,
        inputs.in_baseline,
        inputs.rollout_index,
        inputs.mask,
        inputs.lengths,
        inputs.kl,
        inputs.kl_coef,
    )
    return Estimate(whitened(raw, inputs.mask))
