"""Judging in tests: samples, and texts that stand for what the tokenizer decodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.data.prompts import Prompt
from miles.data.sample import Sample, Status
from miles.rollout.rewards import RewardContext


class Texts:
    """A decoder: token i of the response is text i."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def decode_batch(self, rows):
        return [self._texts[int(row[0])] for row in rows]


def samples_of(texts: Sequence[str], status: Status = Status.COMPLETED) -> list[Sample]:
    return [Sample(f"s-{i}", 0, i, tokens=np.array([9, i]), prompt_length=1, status=status) for i in range(len(texts))]


def context(answer: str = "", metadata=None, **kwargs) -> RewardContext:
    return RewardContext(Prompt(0, np.array([9]), "question", answer, metadata or {"difficulty": 1}), **kwargs)


class Judged:
    """What a pool made of texts."""

    def __init__(self, samples: list[Sample], errors: int, started: int) -> None:
        self.samples, self.errors, self.started = samples, errors, started
        self.rewards = [sample.reward for sample in samples]
        self.parts = [sample.reward_parts for sample in samples]
