"""Where prompts come from. A task is a pure function from an index to an item, and a scorer.

Add a task: one module with a class that has what `Task` lists, one configuration class in `miles.data.config`, one line
in `build_task`. A user's own class is wrapped by `user_task`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.data.chat import Conversation
from miles.data.config import DataConfig


@dataclass(frozen=True, slots=True)
class TaskItem:
    """`text` is the prompt, unless there is a `conversation`; `answer` is any JSON value. `place`: where it is from."""

    text: str
    answer: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None
    place: str = ""

    @property
    def key(self) -> str:
        """What tells this prompt from others, whatever template renders it."""
        return self.text if self.conversation is None else self.conversation.key()


class Task(Protocol):
    """`item(index)` depends on nothing but the task's options, the seed and the index."""

    name: str
    size: int | None  # distinct items, or None when items never end
    has_conversations: bool

    @property
    def alphabet(self) -> str:
        """Characters that prompts and answers of this task use, for a character tokenizer."""
        ...

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
    if config.task == "python":
        from miles.data.tasks.user_task import UserTask

        assert config.python is not None
        return UserTask(config.python, seed)
    from miles.data.tasks.row_file import RowFile

    assert config.rows is not None
    return RowFile(config.task, config.rows, seed)


def build_held_out_task(config: DataConfig, seed: int) -> Task | None:
    """The task over the held-out file, in the file's order; None without one."""
    if config.held_out_path is None:
        return None
    from miles.data.tasks.row_file import RowFile

    assert config.rows is not None
    rows = config.rows.model_copy(update={"path": config.held_out_path, "shuffle": False})
    return RowFile(config.task, rows, seed, option="data.held_out_path")


__all__ = ["Task", "TaskItem", "build_held_out_task", "build_task", "row_file", "row_sources", "user_task"]
