"""Reward kind `positional`."""

from __future__ import annotations

from typing import Any

from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value
from miles.rollout.rewards.options import read_options


def positional(options: dict[str, Any]) -> RewardFn:
    """Share of positions whose character is right; surplus characters count as wrong positions."""
    read_options("positional", options)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        answer = ctx.prompt.answer
        right = sum(a == b for a, b in zip(completion, answer, strict=False))
        return right / max(len(answer), len(completion), 1)

    return RewardFn("positional", inline=score)
