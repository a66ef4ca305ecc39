"""Statistics of the groups of rollouts that answer one prompt. float64, two passes, never E[x^2] - E[x]^2."""

from __future__ import annotations

import numpy as np

from miles.data.counting import ZERO_VARIANCE_SPAN


def group_sum(values: np.ndarray, group_index: np.ndarray, groups: int) -> np.ndarray:
    """Sums per group [G]."""
    return np.bincount(group_index, weights=values, minlength=groups)


def group_baseline(
    rewards: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(rewards with 0 outside the baseline, member counts [G], group means [G], G)."""
    groups = int(group_index.max()) + 1 if len(group_index) else 0
    used = np.where(in_baseline, rewards, 0.0).astype(np.float64)
    counts = group_sum(in_baseline.astype(np.float64), group_index, groups)
    means = group_sum(used, group_index, groups) / np.maximum(counts, 1.0)
    return used, counts, means, groups


def equal_rewards(used: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray, groups: int) -> np.ndarray:
    """bool [G]: rewards span at most 1e-8, or the baseline holds fewer than two rollouts."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group_index[in_baseline], used[in_baseline])
    np.maximum.at(high, group_index[in_baseline], used[in_baseline])
    return ~(high - low > ZERO_VARIANCE_SPAN)
