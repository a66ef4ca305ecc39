"""Reward kind `task`."""

from __future__ import annotations

from typing import Any

from miles.config import ConfigError, user_code
from miles.data.config import DataConfig
from miles.data.sample import Sample
from miles.data.tasks.user_task import OPTION
from miles.rollout.rewards.function import RewardContext, RewardFn, Value, WorkerCall
from miles.rollout.rewards.options import read_options


def task(options: dict[str, Any], data: DataConfig | None = None, *, seed: int = 0) -> RewardFn:
    """The scorer of the prompts' own task (copy_digits: share of right positions; reasoning_gym: its scorer).

    Scorers of reasoning-gym do much with the model's text, and those of one's own do anything: they run in worker
    processes.
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

    if data is not None and data.python is not None:
        path, arguments = data.python.path, {"options": data.python.options, "seed": seed}
        if not callable(getattr(user_code.load(path, option=OPTION, parameters=("options", "seed")), "score", None)):
            raise ConfigError(
                f"rollout.reward.kind is task, but {path} has no method score; define score(self, completion, answer, "
                "metadata), or choose another kind"
            )
        call = WorkerCall("miles.rollout.reward_worker.user_task_scorer:make", {"path": path, **arguments})
        return RewardFn("task", worker=call, text_answers=False)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        if ctx.task_score is None:
            raise ValueError("reward kind task needs a prompt source with a scorer")
        return ctx.task_score(completion, ctx.prompt)

    return RewardFn("task", inline=score)
