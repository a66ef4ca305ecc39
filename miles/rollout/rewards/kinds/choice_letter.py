"""Reward kind `choice_letter`."""

from __future__ import annotations

import re
from typing import Any

from miles.config import ConfigError
from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value
from miles.rollout.rewards.options import read_options


def choice_letter(options: dict[str, Any]) -> RewardFn:
    """The last stand-alone letter out of `letters` (default ABCD), in parentheses or bare, equals the answer's."""
    letters = read_options("choice_letter", options, letters=(str, "ABCD"))["letters"]
    if not letters.strip():
        raise ConfigError("rollout.reward.options.letters is empty, so no answer could be right; write e.g. ABCD")
    # Bounded look-around and single characters: linear in the text.
    pattern = re.compile(rf"(?<![A-Za-z])\(?([{re.escape(letters)}])\)?(?![A-Za-z])")

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        found = pattern.findall(completion)
        return float(bool(found) and found[-1] == ctx.prompt.answer.strip().strip("()"))

    return RewardFn("choice_letter", inline=score)
