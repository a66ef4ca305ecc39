"""What an advantage estimator is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles.algos.advantages.token_returns import token_rewards

if TYPE_CHECKING:
    from miles.algos.config import AlgoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One step's samples as flat read-only arrays: M rollouts in groups, S sequences, n response tokens end to end.

    A rollout is one execution; its sequences (siblings) share its reward. A rollout that failed or has no reward is
    outside the baseline. `values` are there when the estimator declares a critic, `ref_log_probs` and `old_log_probs`
    when it declares a reference, `kl` when `algo.kl.where` is reward.
    """

    rewards: np.ndarray  # float64 [M], 0 outside the baseline
    group_index: np.ndarray  # int64 [M]: 0 to G-1
    in_baseline: np.ndarray  # bool [M]
    rollout_index: np.ndarray  # int64 [S]: 0 to M-1
    lengths: np.ndarray  # int64 [S], sum n
    mask: np.ndarray  # bool [n]: tokens that are trained; the others are no steps
    config: AlgoConfig
    kl: np.ndarray | None = None  # float32 [n], 0 at masked tokens
    values: np.ndarray | None = None  # float32 [n]: the critic's value before each token
    old_log_probs: np.ndarray | None = None  # float32 [n]
    ref_log_probs: np.ndarray | None = None  # float32 [n]

    @property
    def kl_coef(self) -> float:
        """Weight of `kl` in the reward; 0 where rewards hold none."""
        return self.config.kl.coef if self.config.kl.where == "reward" else 0.0

    def per_token(self, per_rollout: np.ndarray) -> np.ndarray:
        """[M] -> [n]: each token gets its rollout's value."""
        return np.repeat(per_rollout[self.rollout_index], self.lengths)

    def token_rewards(self) -> np.ndarray:
        """float64 [n]: -kl_coef·kl, plus the rollout's reward at each sequence's last active token; 0 at masked."""
        outcome = self.rewards[self.rollout_index]
        return token_rewards(outcome, self.mask, self.lengths, self.kl, self.kl_coef)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Floating [n] each. `returns` are what the critic is trained to predict: set them when one is declared."""

    advantages: np.ndarray
    returns: np.ndarray | None = None
