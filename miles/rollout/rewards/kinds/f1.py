"""Reward kind `f1`."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value
from miles.rollout.rewards.options import read_options

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(options: dict[str, Any]) -> RewardFn:
    """Word-overlap F1 of the SQuAD evaluation: lower case, no punctuation, no articles."""
    read_options("f1", options)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        got, wanted = _words(completion), _words(ctx.prompt.answer)
        if not got or not wanted:
            return float(got == wanted)
        common = sum((Counter(got) & Counter(wanted)).values())
        return 2.0 * common / (len(got) + len(wanted))

    return RewardFn("f1", inline=score)
