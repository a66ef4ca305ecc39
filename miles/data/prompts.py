"""`PromptSource`: the run's stream of prompts, resumable by a JSON cursor.

Which prompts are held out depends on the prompt's text alone, so no seed ever trains on them. Tokens are ids
only; a chat template, where a task needs one, is applied by the caller that owns the tokenizer's chat format.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.tasks import TaskItem, build_task

_SCHEMA = 1
# Indices of the held-out stream start here, far from those that training draws.
_HELD_OUT_START = 1 << 30


class Encoder(Protocol):
    def encode(self, text: str) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """`prompt_id` is the index in the stream: unique in a run, and the group's id."""

    prompt_id: int
    input_ids: np.ndarray  # int64 [P]
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptSource:
    """Groups of prompts in an order that depends on (config, seed) alone.

    `state()` after k groups, given to `restore()` of a new source, continues with group k + 1.
    """

    def __init__(self, config: DataConfig, tokenizer: Encoder, seed: int) -> None:
        self.config = config
        self.task = build_task(config, seed)
        self._tokenizer = tokenizer
        self._seed = seed
        self._next = 0

    def next_groups(self, count: int) -> list[Prompt]:
        prompts, self._next = self._draw(count, self._next, held_out=False)
        return prompts

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` prompts that training never sees; the same at every call."""
        if self.config.held_out_fraction == 0.0:
            raise ConfigError("data.held_out_fraction is 0, so no prompt is held out; set it above 0 to evaluate")
        start = 0 if self.task.size is not None else _HELD_OUT_START
        return self._draw(count, start, held_out=True)[0]

    def trained_texts(self, limit: int) -> set[str]:
        """Texts of the first `limit` items of the task (at most all of a file) that training may draw."""
        count = limit if self.task.size is None else min(limit, self.task.size)
        texts = (self.task.item(index).text for index in range(count))
        return {text for text in texts if not self._is_held_out(text)}

    def score(self, completion: str, prompt: Prompt) -> float:
        """The task's own reward for a decoded completion."""
        return self.task.score(completion, TaskItem(prompt.text, prompt.answer, prompt.metadata))

    def state(self) -> dict[str, Any]:
        return {"schema": _SCHEMA, "task": self.config.task, "seed": self._seed, "next_index": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """`ConfigError` when the cursor belongs to another task, seed or schema."""
        for key, mine in (("schema", _SCHEMA), ("task", self.config.task), ("seed", self._seed)):
            if state.get(key) != mine:
                raise ConfigError(
                    f"data cursor: {key} is {state.get(key)!r} in the checkpoint and {mine!r} in this run; "
                    "resume with the recipe that wrote it, or start a new run"
                )
        self._next = int(state["next_index"])

    def _is_held_out(self, text: str) -> bool:
        return zlib.crc32(text.encode()) < self.config.held_out_fraction * 2**32

    def _draw(self, count: int, index: int, *, held_out: bool) -> tuple[list[Prompt], int]:
        prompts: list[Prompt] = []
        # A task with few distinct texts can lie on one side of the split entirely: bounded search.
        limit = index + max(self.task.size or 0, 10_000) + 1000 * count
        while len(prompts) < count:
            if index >= limit:
                side = "held out" if held_out else "left for training"
                raise ConfigError(
                    f"data: no prompt of task {self.task.name} is {side} with data.held_out_fraction="
                    f"{self.config.held_out_fraction}; change it or use a task with more prompts"
                )
            item = self.task.item(index)
            if self._is_held_out(item.text) == held_out:
                prompts.append(self._encode(index, item))
            index += 1
        return prompts, index

    def _encode(self, index: int, item: TaskItem) -> Prompt:
        input_ids = self._tokenizer.encode(item.text)
        if not 0 < len(input_ids) <= self.config.max_prompt_tokens:
            raise ConfigError(
                f"data: prompt {index} ({item.text[:40]!r}) has {len(input_ids)} tokens, allowed are 1 to "
                f"data.max_prompt_tokens={self.config.max_prompt_tokens}; raise it or shorten the prompt"
            )
        return Prompt(index, input_ids, item.text, item.answer, item.metadata)
