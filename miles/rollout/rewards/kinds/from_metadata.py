"""Reward kind `from_metadata`."""

from __future__ import annotations

from typing import Any

from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value
from miles.rollout.rewards.options import read_options


def from_metadata(options: dict[str, Any]) -> RewardFn:
    """The number that the rollout itself left in the sample's metadata under `key` (default `reward`)."""
    key = read_options("from_metadata", options, key=(str, "reward"))["key"]

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        if key not in sample.metadata:
            raise KeyError(f"metadata has no {key!r}; the generate function must set it")
        return sample.metadata[key]

    return RewardFn("from_metadata", inline=score, text_answers=False)
