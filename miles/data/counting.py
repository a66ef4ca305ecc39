"""Who counts in a step: effective loss masks, the counted rollouts N, the group baselines.

Frozen before any off-policy rejection; numerator and denominator of every loss use these same masks.

| case | loss mask | in N | in group baseline |
|---|---|---|---|
| normal; truncated with mask_truncated=false | as is | yes | yes |
| truncated with mask_truncated=true; removed by a filter; fully masked | 0 | no | yes |
| aborted, failed, env_error, reward None | 0 | no | no |
| zero-variance group, keep (advantage 0) | as is | yes | yes |
| zero-variance group, drop | 0 | no | yes |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from miles.data.sample import Rollout, Sample, Status, gather_rollouts

# A group's rewards are equal when they span at most this much (float64).
ZERO_VARIANCE_SPAN = 1e-8


@dataclass(frozen=True, slots=True)
class Counted:
    """S samples of M rollouts in G groups.

    `masks`: uint8 [R] per sample, never the sample's own array. `tokens` int64 [M] is D_r, `in_step` bool [M]
    says who is in N, `in_baseline` bool [M]; `rewards` float64 [M] (NaN where None).
    """

    masks: list[np.ndarray]
    rollouts: list[Rollout]
    rollout_index: np.ndarray  # int64 [S]
    group_index: np.ndarray  # int64 [M]
    groups: int
    rewards: np.ndarray
    in_step: np.ndarray
    in_baseline: np.ndarray
    zero_variance: np.ndarray  # bool [G]
    tokens: np.ndarray

    @property
    def trained(self) -> np.ndarray:
        """bool [S]: samples with at least one active token. The others need no forward pass."""
        return np.fromiter((bool(m.any()) for m in self.masks), dtype=bool, count=len(self.masks))


def count_rollouts(
    samples: Sequence[Sample],
    *,
    mask_truncated: bool = False,
    zero_variance: Literal["keep", "drop"] = "keep",
    needs_reward: bool = True,
) -> Counted:
    """Apply the table above. `needs_reward=False` (supervised loss) counts samples without a reward.

    `ValueError`: a pending sample, siblings that disagree on their reward or group.
    """
    rollouts = gather_rollouts(samples)
    number = {rollout.rollout_id: i for i, rollout in enumerate(rollouts)}
    rollout_index = np.fromiter((number[s.rollout_id] for s in samples), dtype=np.int64, count=len(samples))
    _, group_index = np.unique(np.array([r.group_id for r in rollouts], dtype=np.int64), return_inverse=True)
    rewards = np.array([np.nan if r.reward is None else r.reward for r in rollouts], dtype=np.float64)
    in_baseline = np.fromiter(
        (_has_outcome(r) and (r.reward is not None or not needs_reward) for r in rollouts), bool, len(rollouts)
    )
    groups = int(group_index.max()) + 1 if len(rollouts) else 0
    equal = _zero_variance(rewards, in_baseline, group_index, groups)
    dropped = equal[group_index] if needs_reward and zero_variance == "drop" else np.zeros(len(rollouts), dtype=bool)
    alive = in_baseline & ~dropped
    masks = []
    for sample, rollout in zip(samples, rollout_index.tolist(), strict=True):
        out = not alive[rollout] or sample.removed or (mask_truncated and sample.status == Status.TRUNCATED)
        assert sample.loss_mask is not None
        masks.append(np.zeros_like(sample.loss_mask) if out else sample.loss_mask.copy())
    tokens = np.bincount(
        rollout_index, weights=[int(np.count_nonzero(m)) for m in masks], minlength=len(rollouts)
    ).astype(np.int64)
    return Counted(masks, rollouts, rollout_index, group_index, groups, rewards, tokens > 0, in_baseline, equal, tokens)


def _has_outcome(rollout: Rollout) -> bool:
    # One execution: a segment that failed or was aborted spoils the whole rollout.
    for sample in rollout.samples:
        if sample.status == Status.PENDING:
            raise ValueError(
                f"sample {sample.sample_id!r} is pending; only finished samples are trained: wait for the "
                "generation, or mark it aborted"
            )
        if not sample.status.has_outcome:
            return False
    return True


def _zero_variance(rewards: np.ndarray, in_baseline: np.ndarray, group_index: np.ndarray, groups: int) -> np.ndarray:
    """bool [G]; a group with fewer than two baseline rollouts has none either."""
    low = np.full(groups, np.inf)
    high = np.full(groups, -np.inf)
    known = in_baseline & ~np.isnan(rewards)
    np.minimum.at(low, group_index[known], rewards[known])
    np.maximum.at(high, group_index[known], rewards[known])
    return ~(high - low > ZERO_VARIANCE_SPAN)
