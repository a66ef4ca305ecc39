"""`PromptSource`: the run's stream of prompts, resumable by a JSON cursor.

A prompt is encoded when it is drawn, or, of a task that ends, by `look_at_all`, which tells what is wrong with any
before something starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.held_out import held_out_keys, is_held_out
from miles.data.prompt_encoder import Encoder, PromptEncoder
from miles.data.tasks import Task, TaskItem, build_held_out_task, build_task

_SCHEMA = 1
# Indices of the held-out stream start here, far from those that training draws.
_HELD_OUT_START = 1 << 30
# Places of prompts above the limit that a note lists.
_MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """`prompt_id` is the index in the stream: unique in a run, and the group's id."""

    prompt_id: int
    input_ids: np.ndarray  # int64 [P]
    text: str
    answer: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    key: str = ""  # `TaskItem.key`


@dataclass
class TooLong:
    """Prompts above `data.max_prompt_tokens` that were left out or cut."""

    count: int = 0
    listed: list[str] = field(default_factory=list)

    def add(self, place: str, tokens: int) -> None:
        self.count += 1
        if len(self.listed) < _MOST_LISTED:
            self.listed.append(f"{place} ({tokens} tokens)")


class PromptSource:
    """Groups of prompts in an order that depends on (config, seed) alone.

    `state()` after k groups, given to `restore()` of a new source, continues with group k + 1. `close()` ends the process
    that renders conversations.
    """

    def __init__(self, config: DataConfig, tokenizer: Encoder, seed: int) -> None:
        self.config = config
        self.task = build_task(config, seed)
        self.too_long = TooLong()
        self._held_out_task = build_held_out_task(config, seed)
        self._encoder = PromptEncoder(config, tokenizer)
        self._seed = seed
        self._next = 0
        self._trained_and_held_out = 0
        self._all_looked_at = False
        # (text, ids) by key; None for a prompt that is left out
        self._looked_at: dict[str, tuple[str, np.ndarray] | None] = {}
        self._held_out_keys: frozenset[str] = frozenset()
        if self._held_out_task is None and self.task.size is not None:
            keys = {item.key for item in _items(self.task)}
            if config.too_long == "drop" and config.held_out_fraction:
                # What is left out is on neither side.
                self.look_at_all()
                keys = {key for key in keys if self._looked_at[key] is not None}
            self._held_out_keys = held_out_keys(keys, config.held_out_fraction)

    def __enter__(self) -> PromptSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._encoder.close()

    def look_at_all(self) -> None:
        """Encode every prompt of a task that ends, in the order of its file, so that its first fault is the one told."""
        if self._all_looked_at:
            return
        try:
            trained = self._look_at(self.task)
            if self._held_out_task is not None:
                self._trained_and_held_out = len(trained & self._look_at(self._held_out_task))
        except BaseException:
            self.close()
            raise
        self._all_looked_at = True

    def next_groups(self, count: int) -> list[Prompt]:
        prompts, self._next = self._draw(self.task, count, self._next, held_out=False)
        return prompts

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` prompts that training never sees; the same at every call. Of a file each row comes once."""
        if self._held_out_task is not None:
            return self._draw(self._held_out_task, count, 0, held_out=True, ids_from=_HELD_OUT_START)[0]
        if self.config.held_out_fraction == 0.0:
            raise ConfigError("data.held_out_fraction is 0, so no prompt is held out; set it above 0 to evaluate")
        start = 0 if self.task.size is not None else _HELD_OUT_START
        return self._draw(self.task, count, start, held_out=True)[0]

    def trained_keys(self, limit: int) -> set[str]:
        """Keys of the first `limit` items of the task (at most all of a file) that training may draw."""
        count = limit if self.task.size is None else min(limit, self.task.size)
        items = (self.task.item(index) for index in range(count))
        return {item.key for item in items if not self._is_held_out(item)}

    def score(self, completion: str, prompt: Prompt) -> float:
        """The task's own reward for a decoded completion."""
        return self.task.score(completion, TaskItem(prompt.text, prompt.answer, prompt.metadata))

    def notes(self) -> list[str]:
        """What was done to prompts that a user should know of, a line each."""
        found = []
        if self.too_long.count:
            done = "left out" if self.config.too_long == "drop" else "cut at their beginning"
            more = ", ..." if self.too_long.count > len(self.too_long.listed) else ""
            found.append(
                f"data.too_long={self.config.too_long}: {self.too_long.count} prompts have more than data.max_prompt_tokens="
                f"{self.config.max_prompt_tokens} tokens and are {done}: {', '.join(self.too_long.listed)}{more}; raise "
                "data.max_prompt_tokens to keep them whole"
            )
        if self._trained_and_held_out:
            found.append(
                f"data.held_out_path: {self._trained_and_held_out} of its prompts are trained on too; take them out of one "
                "of the two files"
            )
        return found

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

    def _look_at(self, task: Task) -> set[str]:
        """Keys of the items of a task that ends; of one without end none is looked at."""
        if task.size is None:
            return set()
        items = sorted(_items(task), key=lambda item: (len(item.place), item.place))
        for item in items:
            self._encoded(task, item, item.place or f"data: prompt {item.text[:40]!r}")
        return {item.key for item in items}

    def _draw(
        self, task: Task, count: int, index: int, *, held_out: bool, ids_from: int = 0
    ) -> tuple[list[Prompt], int]:
        prompts: list[Prompt] = []
        # A task with few distinct prompts can lie on one side of the split entirely: bounded search.
        limit = index + max(task.size or 0, 10_000) + 1000 * count
        if held_out and task.size is not None:
            limit = task.size
        while len(prompts) < count:
            if index >= limit:
                if held_out and prompts:
                    break
                side = "held out" if held_out else "left for training"
                raise ConfigError(
                    f"data: no prompt of task {task.name} is {side} with data.held_out_fraction="
                    f"{self.config.held_out_fraction} and data.max_prompt_tokens={self.config.max_prompt_tokens}; change "
                    "them or use a task with more prompts"
                )
            item = task.item(index)
            if task is self._held_out_task or self._is_held_out(item) == held_out:
                encoded = self._encoded(task, item, item.place or f"data: prompt {index} ({item.text[:40]!r})")
                if encoded is not None:
                    text, ids = encoded
                    prompts.append(Prompt(ids_from + index, ids, text, item.answer, item.metadata, item.key))
            index += 1
        return prompts, index

    def _is_held_out(self, item: TaskItem) -> bool:
        if self._held_out_task is not None:
            return False
        if self.task.size is None:
            return is_held_out(item.key, self.config.held_out_fraction)
        return item.key in self._held_out_keys

    def _encoded(self, task: Task, item: TaskItem, place: str) -> tuple[str, np.ndarray] | None:
        """`_encode`, once for each prompt of a task that ends."""
        if task.size is None:
            return self._encode(item, place)
        if item.key not in self._looked_at:
            self._looked_at[item.key] = self._encode(item, place)
        return self._looked_at[item.key]

    def _encode(self, item: TaskItem, place: str) -> tuple[str, np.ndarray] | None:
        text, ids = self._encoder.encode(item, place=place)
        if len(ids) == 0:
            raise ConfigError(f"{place} has 0 tokens; write a prompt that is not empty")
        most = self.config.max_prompt_tokens
        if len(ids) <= most:
            return text, ids
        if self.config.too_long == "error":
            raise ConfigError(
                f"{place} has {len(ids)} tokens, allowed are 1 to data.max_prompt_tokens={most}; raise it, shorten the "
                "prompt, or set data.too_long to drop or truncate_left"
            )
        self.too_long.add(place, len(ids))
        return None if self.config.too_long == "drop" else (text, ids[-most:])


def _items(task: Task) -> list[TaskItem]:
    """All of a task that ends."""
    assert task.size is not None
    return [task.item(index) for index in range(task.size)]
