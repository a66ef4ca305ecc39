"""Rewards: from a finished sample to a finite number.

`build_reward(config, data)` makes the function of `rollout.reward.kind`, `RewardPool` judges groups with it: at once in
the event loop, awaited there, or in worker processes that can be killed (`miles.rollout.reward_worker`).
"""

from miles.rollout.rewards.config import RewardConfig
from miles.rollout.rewards.function import RewardContext, RewardFn, WorkerCall
from miles.rollout.rewards.kinds import build_reward, give
from miles.rollout.rewards.pool import RewardPool
from miles.rollout.rewards.shaping import shape_rewards

__all__ = [
    "RewardConfig",
    "RewardContext",
    "RewardFn",
    "RewardPool",
    "WorkerCall",
    "build_reward",
    "give",
    "shape_rewards",
]
