"""GRPO: rewards relative to the group's mean, in units of its standard deviation."""

from __future__ import annotations

import numpy as np

from miles.algos.advantages.groups import equal_rewards, group_baseline, group_sum
from miles.algos.advantages.inputs import AdvantageInputs, Estimate

STD_EPS = 1e-6


def grpo(
    rewards: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray, *, normalize_std: bool = True
) -> np.ndarray:
    """(R - mean) / (std + 1e-6) per rollout [M], std with ddof 1 (Shao et al. 2024); 0 outside the baseline.

    A group of one, or one whose rewards span at most 1e-8, gets 0. `normalize_std=False` is Dr. GRPO (Liu et
    al. 2025): R - mean.
    """
    used, counts, means, groups = group_baseline(rewards, group_index, in_baseline)
    centred = np.where(in_baseline, used - means[group_index], 0.0)
    equal = equal_rewards(used, group_index, in_baseline, groups)
    if normalize_std:
        variance = group_sum(centred**2, group_index, groups) / np.maximum(counts - 1.0, 1.0)
        centred = centred / (np.sqrt(variance) + STD_EPS)[group_index]
    return np.where(equal[group_index], 0.0, centred).astype(np.float32)


def estimate(inputs: AdvantageInputs) -> Estimate:
    """Every token gets its rollout's advantage."""
    per_rollout = grpo(
        inputs.rewards, inputs.group_index, inputs.in_baseline, normalize_std=inputs.config.normalize_std
    )
    return Estimate(inputs.per_token(per_rollout))
