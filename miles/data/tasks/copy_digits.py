"""Copy a string of digits: `352=` is answered by `352`. Learnable from random weights in seconds."""

from __future__ import annotations

import numpy as np

from miles.data.config import CopyDigitsConfig
from miles.data.tasks import TaskItem


class CopyDigits:
    name = "copy_digits"
    alphabet = "0123456789="
    size: int | None = None
    has_conversations = False

    def __init__(self, config: CopyDigitsConfig, seed: int) -> None:
        self.digits = config.digits
        self._seed = seed

    def item(self, index: int) -> TaskItem:
        # The high words of the counter number the item: streams of two items never overlap.
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=index << 64))
        text = "".join(map(str, rng.integers(0, 10, self.digits).tolist()))
        return TaskItem(f"{text}=", text)

    def score(self, completion: str, item: TaskItem) -> float:
        """Share of positions that are right; surplus characters count as wrong positions."""
        right = sum(a == b for a, b in zip(completion, item.answer, strict=False))
        return right / max(len(item.answer), len(completion), 1)
