"""Generalised advantage estimation with a critic, as PPO uses it."""

from __future__ import annotations

import numpy as np

from miles.algos.advantages.inputs import AdvantageInputs, Estimate
from miles.algos.advantages.token_returns import discounted_sums
from miles.algos.advantages.whiten import whitened


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


def estimate(inputs: AdvantageInputs) -> Estimate:
    """Advantages whitened over the step; returns as they are."""
    assert inputs.values is not None
    config = inputs.config
    raw, returns = gae(
        inputs.token_rewards(), inputs.values, inputs.mask, inputs.lengths, gamma=config.gamma, lam=config.gae_lambda
    )
    return Estimate(whitened(raw, inputs.mask), returns)
