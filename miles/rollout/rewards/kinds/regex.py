"""Reward kind `regex`."""

from __future__ import annotations

import re
from typing import Any

from miles.config import ConfigError
from miles.rollout.rewards.function import RewardFn, WorkerCall
from miles.rollout.rewards.options import read_options


def regex(options: dict[str, Any]) -> RewardFn:
    """Group 1 (or the whole match) of `pattern`, last match, equals the answer; without `compare` a match is 1."""
    values = read_options("regex", options, pattern=(str, None), compare=(bool, True))
    try:
        re.compile(values["pattern"], re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"rollout.reward.options.pattern: {values['pattern'][:200]!r} is no regular expression: {error}; escape "
            "special characters with a backslash"
        ) from None
    call = WorkerCall("miles.rollout.reward_worker.regex:make", values, computes=True, memory_gib=1.0)
    return RewardFn("regex", worker=call, masks_errors=True, text_answers=values["compare"])
