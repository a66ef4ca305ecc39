"""Reward kind `python`."""

from __future__ import annotations

import inspect
from typing import Any

from miles.config import user_code
from miles.data.sample import Sample
from miles.rollout.reward_worker.user_function import OPTION, PARAMETERS
from miles.rollout.rewards.function import RewardContext, RewardFn, Value, WorkerCall
from miles.rollout.rewards.options import read_options


def python(options: dict[str, Any]) -> RewardFn:
    """`path` names the user's (completion, answer, metadata) -> reward: a coroutine function in the event loop, a plain
    one in worker processes.
    """
    path = read_options("python", options, path=(str, None))["path"]
    reference = user_code.reference(path)
    function = user_code.load(reference, option=OPTION, parameters=PARAMETERS, may_await=True)
    if not inspect.iscoroutinefunction(function):
        call = WorkerCall("miles.rollout.reward_worker.user_function:make", {"path": reference})
        return RewardFn(path, worker=call, text_answers=False)

    async def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        return await function(completion, ctx.prompt.answer, ctx.prompt.metadata)

    return RewardFn(path, awaited=score, text_answers=False)
