"""Where prompts come from. A task is a pure function from an index to an item, and a scorer.

Add a task: one module with a class that has `name`, `alphabet`, `size`, `item(index)` and `score(...)`, one
configuration class in `miles.data.config`, one line in `build_task`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.data.config import DataConfig


@dataclass(frozen=True, slots=True)
class TaskItem:
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """`item(index)` depends on nothing but the task's options, the seed and the index."""

    name: str
    alphabet: str  # characters that prompts and answers of this task use, for a character tokenizer
    size: int | None  # distinct items, or None when items never end

    def item(self, index: int) -> TaskItem: ...

    def score(self, completion: str, item: TaskItem) -> float:
        """Reward in [0, 1] of the decoded completion, without end-of-sequence token."""
        ...


def build_task(config: DataConfig, seed: int) -> Task:
    if config.task == "copy_digits":
        from miles.data.tasks.copy_digits import CopyDigits

        return CopyDigits(config.copy_digits, seed)
    if config.task == "reasoning_gym":
        from miles.data.tasks.reasoning_gym import ReasoningGym

        return ReasoningGym(config.reasoning_gym, seed)
    from miles.data.tasks.jsonl import JsonlFile

    assert config.jsonl is not None
    return JsonlFile(config.jsonl, seed)


__all__ = ["TaskItem", "build_task"]
