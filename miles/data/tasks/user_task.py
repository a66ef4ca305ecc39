"""A task of the user's own: a class made with (options, seed), of which items and perhaps scores are asked.

`item(index)` gives `{"prompt": text or "messages": list, "answer": JSON, "metadata": object, "tools": list}`. `size` is
the number of distinct items, or None. `score(completion, answer, metadata)` is used by reward kind `task`.
"""

from __future__ import annotations

import json
from typing import Any

from miles.config import ConfigError, user_code
from miles.data.chat import Conversation, check_characters
from miles.data.config import PythonTaskConfig
from miles.data.tasks import TaskItem

OPTION = "data.python.path"
# What a character tokenizer knows when the class does not say.
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
# More would be looked at for hours before the run starts.
MOST_ITEMS = 1_000_000
_KEYS = ("prompt", "messages", "tools", "answer", "metadata")


def build(path: str, options: dict[str, Any], seed: int) -> Any:
    """An object of the user's class. `ConfigError` with the user's traceback."""
    made = user_code.load(path, option=OPTION, parameters=("options", "seed"))
    with user_code.running(path, option=OPTION):
        return made(options, seed)


class UserTask:
    name = "python"

    def __init__(self, config: PythonTaskConfig, seed: int) -> None:
        self._path = config.path
        self._task = build(config.path, config.options, seed)
        if not callable(getattr(self._task, "item", None)):
            raise ConfigError(f"{OPTION}: {config.path} has no method item; define item(self, index)")
        self.size = self._size()
        self.alphabet: str = getattr(self._task, "alphabet", PRINTABLE)
        first = self.item(0)
        again = self.item(0)
        if (first.key, first.answer) != (again.key, again.answer):
            raise ConfigError(
                f"{OPTION}: {config.path} gave two items for index 0; make item depend on nothing but options, seed and index"
            )
        self.has_conversations = first.conversation is not None

    def item(self, index: int) -> TaskItem:
        place = f"{OPTION}: {self._path} item({index})"
        with user_code.running(self._path, option=f"{OPTION} item({index})"):
            # A size is an epoch: the same items come again.
            value = self._task.item(index if self.size is None else index % self.size)
        return _checked(value, place)

    def score(self, completion: str, item: TaskItem) -> float:
        raise RuntimeError(
            "scorers of one's own run in worker processes: use `miles.rollout.rewards.build_reward` with the data section"
        )

    def _size(self) -> int | None:
        size = getattr(self._task, "size", None)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"{OPTION}: {self._path}.size is {size!r}; give the number of items, or None for no end")
        if size is not None and size > MOST_ITEMS:
            raise ConfigError(
                f"{OPTION}: {self._path}.size is {size}, at most {MOST_ITEMS}; leave it out: items never end"
            )
        return size


def _checked(value: Any, place: str) -> TaskItem:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {type(value).__name__}; return a mapping with prompt or messages, and answer")
    unknown = sorted(map(str, value.keys() - set(_KEYS)))
    if unknown:
        raise ConfigError(f"{place} has the key {unknown[0]!r}; use {', '.join(_KEYS)}, and metadata for the rest")
    if ("prompt" in value) == ("messages" in value):
        raise ConfigError(f"{place} must have one of prompt and messages; remove or add one")
    metadata = value.get("metadata") or {}
    try:
        json.dumps([value.get("answer"), metadata])
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: answer and metadata must be JSON: {error}; convert them") from None
    if not isinstance(metadata, dict):
        raise ConfigError(f"{place}: metadata is {type(metadata).__name__}; return a mapping")
    if "messages" in value:
        conversation = Conversation.of(value["messages"], value.get("tools"), place=place)
        return TaskItem("", value.get("answer"), metadata, conversation, place)
    text = value["prompt"]
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{place}: prompt is {text!r:.60}; return text that is not empty")
    check_characters(text, f"{place}: prompt")
    return TaskItem(text, value.get("answer"), metadata, None, place)
