"""Reward kind `exact`."""

from __future__ import annotations

from typing import Any

from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value
from miles.rollout.rewards.options import read_options


def exact(options: dict[str, Any]) -> RewardFn:
    """1 when the completion is the answer. `strip` (default true) ignores white space around both."""
    strip = read_options("exact", options, strip=(bool, True))["strip"]

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        a, b = (completion.strip(), ctx.prompt.answer.strip()) if strip else (completion, ctx.prompt.answer)
        return 1.0 if a == b else 0.0

    return RewardFn("exact", inline=score)
