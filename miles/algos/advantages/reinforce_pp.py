"""REINFORCE++: discounted returns, whitened over the whole step instead of compared within a group."""

from __future__ import annotations

import numpy as np

from miles.algos.advantages.inputs import AdvantageInputs, Estimate
from miles.algos.advantages.token_returns import discounted_sums
from miles.algos.advantages.whiten import whitened


def reinforce_pp(rewards: np.ndarray, mask: np.ndarray, lengths: np.ndarray, *, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma·G_next of token rewards [n] -> float64 [n], not yet whitened (Hu 2025).

    Nothing is centred yet: in fp32, rewards that differ little beside their size would all be one number.
    """
    return discounted_sums(rewards, mask, lengths, gamma)


def estimate(inputs: AdvantageInputs) -> Estimate:
    """Returns of token rewards, whitened over the step."""
    raw = reinforce_pp(inputs.token_rewards(), inputs.mask, inputs.lengths, gamma=inputs.config.gamma)
    return Estimate(whitened(raw, inputs.mask))
