"""RLOO: each rollout's reward less the mean of the others in its group."""

from __future__ import annotations

import numpy as np

from miles.algos.advantages.groups import equal_rewards, group_baseline
from miles.algos.advantages.inputs import AdvantageInputs, Estimate


def rloo(rewards: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray) -> np.ndarray:
    """R_i - (sum R - R_i)/(n-1) per rollout [M] (Ahmadian et al. 2024); a group of one gets 0."""
    used, counts, means, groups = group_baseline(rewards, group_index, in_baseline)
    # Equal to n/(n-1)·(R - mean), which keeps equal rewards at exactly 0 once their span is checked.
    equal = equal_rewards(used, group_index, in_baseline, groups)
    factor = counts / np.maximum(counts - 1.0, 1.0)
    out = (used - means[group_index]) * factor[group_index]
    return np.where(in_baseline & ~equal[group_index], out, 0.0).astype(np.float32)


def estimate(inputs: AdvantageInputs) -> Estimate:
    """Every token gets its rollout's advantage."""
    return Estimate(inputs.per_token(rloo(inputs.rewards, inputs.group_index, inputs.in_baseline)))
