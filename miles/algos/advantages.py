"""Advantage estimators: pure functions from rewards (and values, KL) to advantages.

Numpy on flat arrays, so that the process that collects samples needs no torch; statistics are taken in
float64, two passes (never E[x^2] - E[x]^2). Masked tokens are not steps: no discount crosses them. No input is
written. `whiten` is the exception: a tensor function that spans the data x context-parallel group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

from miles.data.counting import ZERO_VARIANCE_SPAN

STD_EPS = 1e-6


def _group_sum(values: np.ndarray, group_index: np.ndarray, groups: int) -> np.ndarray:
    return np.bincount(group_index, weights=values, minlength=groups)


def _baseline(
    rewards: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(rewards with 0 outside the baseline, member counts [G], group means [G], G)."""
    groups = int(group_index.max()) + 1 if len(group_index) else 0
    used = np.where(in_baseline, rewards, 0.0).astype(np.float64)
    counts = _group_sum(in_baseline.astype(np.float64), group_index, groups)
    means = _group_sum(used, group_index, groups) / np.maximum(counts, 1.0)
    return used, counts, means, groups


def _span(used: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray, groups: int) -> np.ndarray:
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group_index[in_baseline], used[in_baseline])
    np.maximum.at(high, group_index[in_baseline], used[in_baseline])
    return high - low


def grpo(
    rewards: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray, *, normalize_std: bool = True
) -> np.ndarray:
    """(R - mean) / (std + 1e-6) per rollout [M], std with ddof 1 (Shao et al. 2024); 0 outside the baseline.

    A group of one, or one whose rewards span at most 1e-8, gets 0. `normalize_std=False` is Dr. GRPO (Liu et
    al. 2025): R - mean.
    """
    used, counts, means, groups = _baseline(rewards, group_index, in_baseline)
    centred = np.where(in_baseline, used - means[group_index], 0.0)
    equal = ~(_span(used, group_index, in_baseline, groups) > ZERO_VARIANCE_SPAN)
    if normalize_std:
        variance = _group_sum(centred**2, group_index, groups) / np.maximum(counts - 1.0, 1.0)
        centred = centred / (np.sqrt(variance) + STD_EPS)[group_index]
    return np.where(equal[group_index], 0.0, centred).astype(np.float32)


def rloo(rewards: np.ndarray, group_index: np.ndarray, in_baseline: np.ndarray) -> np.ndarray:
    """R_i - (sum R - R_i)/(n-1) per rollout [M] (Ahmadian et al. 2024); a group of one gets 0."""
    used, counts, means, groups = _baseline(rewards, group_index, in_baseline)
    # Equal to n/(n-1)·(R - mean), which keeps equal rewards at exactly 0 once their span is checked.
    equal = ~(_span(used, group_index, in_baseline, groups) > ZERO_VARIANCE_SPAN)
    factor = counts / np.maximum(counts - 1.0, 1.0)
    out = (used - means[group_index]) * factor[group_index]
    return np.where(in_baseline & ~equal[group_index], out, 0.0).astype(np.float32)


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


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, lengths: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) float32 [n] of token rewards and values [n] (Schulman et al. 2016).

    delta_t = r_t + gamma·V_next - V_t, A_t = delta_t + gamma·lam·A_next over active tokens; the value after the
    last active token is 0, also when the rollout was truncated. returns = A + V.
    """
    active = mask.astype(bool)
    v = np.where(active, values, 0.0).astype(np.float64)
    following = np.zeros_like(v)
    positions = np.flatnonzero(active)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    if len(positions) > 1:
        same = sequence[positions[1:]] == sequence[positions[:-1]]
        following[positions[:-1]] = np.where(same, v[positions[1:]], 0.0)
    delta = rewards + gamma * following - v
    advantages = discounted_sums(delta, mask, lengths, gamma * lam)
    returns = np.where(active, advantages + v, 0.0)
    return advantages.astype(np.float32), returns.astype(np.float32)


def reinforce_pp(rewards: np.ndarray, mask: np.ndarray, lengths: np.ndarray, *, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma·G_next of token rewards [n] -> float64 [n], not yet whitened (Hu 2025).

    Nothing is centred yet: in fp32, rewards that differ little beside their size would all be one number.
    """
    return discounted_sums(rewards, mask, lengths, gamma)


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
    """A_t = (R - group mean) - beta·kl_t -> float32 [n], not yet whitened. rewards [M], rollout_index [S]."""
    used, _, means, _ = _baseline(rewards, group_index, in_baseline)
    centred = np.where(in_baseline, used - means[group_index], 0.0)
    out = np.repeat(centred[rollout_index], lengths)
    if kl is not None and beta != 0.0:
        out = out - beta * kl.astype(np.float64)
    return np.where(mask.astype(bool), out, 0.0).astype(np.float32)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """(x - mu)·rsqrt(var + 1e-8) over the active tokens of every rank in `group` (data x context parallel).

    mu = sum(m x)/n, var = sum(m (x-mu)^2)/max(n-1, 1), accumulated in float64 on every device. fp32 out, 0 at
    masked tokens; n <= 1 gives zeros. Every rank must call, whatever its slice holds.
    """
    import torch

    from miles.algos.collectives import all_reduce

    active = mask.to(torch.bool)
    x = torch.where(active, values.to(torch.float64), 0.0)
    totals = all_reduce(torch.stack([x.sum(), active.sum().to(torch.float64)]), group=group, name="whitening sums")
    n = totals[1]
    mean = totals[0] / n.clamp(min=1.0)
    centred = torch.where(active, x - mean, 0.0)
    squares = all_reduce(centred.square().sum().reshape(1), group=group, name="whitening squares")
    variance = squares[0] / (n - 1.0).clamp(min=1.0)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    return torch.where(n > 1, whitened, 0.0).to(torch.float32)
