"""Reward kind `task`."""

from __future__ import annotations

from typing import Any

from miles.data.config import DataConfig
from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value, WorkerCall
from miles.rollout.rewards.options import read_options


def task(options: dict[str, Any], data: DataConfig | None = None) -> RewardFn:
    """The scorer of the prompts' own task (copy_digits: share of right positions; reasoning_gym: its scorer).

    Scorers of reasoning-gym do much with the model's text: they run in worker processes.
    """
    read_options("task", options)
    if data is not None and data.task == "reasoning_gym":
        gym = data.reasoning_gym
        call = WorkerCall(
            "miles.rollout.reward_worker.reasoning_gym_scorer:make",
            {"dataset": gym.dataset, "params": gym.params},
            computes=True,
        )
        return RewardFn("task", worker=call, masks_errors=True)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        if ctx.task_score is None:
            raise ValueError("reward kind task needs a prompt source with a scorer")
        return ctx.task_score(completion, ctx.prompt)

    return RewardFn("task", inline=score)
