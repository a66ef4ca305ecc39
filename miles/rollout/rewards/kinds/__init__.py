"""The built-in reward kinds, one file each: made from their options, they compare a completion with the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.data.config import DataConfig
from miles.rollout.rewards.config import RewardConfig
from miles.rollout.rewards.function import RewardFn
from miles.rollout.rewards.kinds.choice_letter import choice_letter
from miles.rollout.rewards.kinds.exact import exact
from miles.rollout.rewards.kinds.f1 import f1
from miles.rollout.rewards.kinds.from_metadata import from_metadata
from miles.rollout.rewards.kinds.given import KIND, give, given_function
from miles.rollout.rewards.kinds.math_boxed import math_boxed
from miles.rollout.rewards.kinds.positional import positional
from miles.rollout.rewards.kinds.python import python
from miles.rollout.rewards.kinds.regex import regex
from miles.rollout.rewards.kinds.remote_http import remote_http
from miles.rollout.rewards.kinds.task import task

KINDS: dict[str, Callable[[dict[str, Any]], RewardFn]] = {
    fn.__name__: fn
    for fn in (exact, positional, regex, choice_letter, f1, from_metadata, remote_http, math_boxed, python)
}


def build_reward(config: RewardConfig, data: DataConfig | None = None, *, seed: int = 0) -> RewardFn:
    """The function of `rollout.reward.kind`; `ConfigError` for options that it does not take.

    `data` says whose scorer the kind `task` is, `seed` is the run's.
    """
    if config.kind == "task":
        return task(config.options, data, seed=seed)
    if config.kind == KIND:
        return given_function(config.options)
    return KINDS[config.kind](config.options)


__all__ = ["build_reward", "give"]
