"""Rewards of tokens and their discounted sums. Masked tokens are not steps: no discount crosses them."""

from __future__ import annotations

import numpy as np


def discounted_sums(values: np.ndarray, mask: np.ndarray, lengths: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor·y_next over the active tokens of each sequence, float64 [n]; 0 at masked tokens.

    values [n], mask [n], lengths [S] with sum n. Vectorised over sequences: one pass per token position.
    """
    active = mask.astype(bool)
    sequence = np.repeat(np.arange(len(lengths)), lengths)[active]
    counts = np.bincount(sequence, minlength=len(lengths))
    step = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    grid = np.zeros((int(counts.max(initial=0)), len(lengths)), dtype=np.float64)
    grid[step, sequence] = values[active]
    for at in range(len(grid) - 2, -1, -1):
        grid[at] += factor * grid[at + 1]
    out = np.zeros(len(values), dtype=np.float64)
    out[active] = grid[step, sequence]
    return out


def token_rewards(
    rewards: np.ndarray, mask: np.ndarray, lengths: np.ndarray, kl: np.ndarray | None = None, beta: float = 0.0
) -> np.ndarray:
    """r_t = -beta·kl_t, plus the sequence's reward at its last active token, float64 [n]; 0 at masked tokens.

    rewards [S]; kl [n] or None.
    """
    active = mask.astype(bool)
    out = np.zeros(len(mask), dtype=np.float64)
    if kl is not None and beta != 0.0:
        out[active] = -beta * kl[active].astype(np.float64)
    if active.any():
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.flatnonzero(active)
        last = np.flatnonzero(np.append(np.diff(sequence[positions]) > 0, True))
        at = positions[last]
        out[at] += rewards[sequence[at]]
    return out
