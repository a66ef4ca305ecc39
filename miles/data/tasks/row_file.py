"""Prompts from the rows of a file, reshuffled each epoch by a seed; the exact answer scores 1."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from miles.config import ConfigError
from miles.config.json_text import parse_json
from miles.data.chat import Conversation, check_characters
from miles.data.config import RowsConfig
from miles.data.tasks import TaskItem
from miles.data.tasks.row_sources import Row, open_rows


class RowFile:
    def __init__(self, kind: str, config: RowsConfig, seed: int, *, option: str | None = None) -> None:
        """`kind`: jsonl, parquet or dataset. `option`: the one that names the path, for messages."""
        self.name = kind
        option = option or f"data.{kind}.path"
        self._items = [_item(row, place, config) for place, row in open_rows(kind, config, option)]
        if not self._items:
            raise ConfigError(f"{option}: {config.path} holds no prompts; write one row for each")
        self.size: int | None = len(self._items)
        self.has_conversations = config.messages_key is not None
        self._seed, self._shuffle = seed, config.shuffle
        self._epoch, self._order = -1, np.arange(len(self._items))

    @property
    def alphabet(self) -> str:
        seen: set[str] = set()
        for item in self._items:
            seen.update(item.text if item.conversation is None else item.key)
            if isinstance(item.answer, str):
                seen.update(item.answer)
        return "".join(sorted(seen))

    def item(self, index: int) -> TaskItem:
        epoch, position = divmod(index, len(self._items))
        if self._shuffle and epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(key=self._seed, counter=epoch << 64))
            self._epoch, self._order = epoch, rng.permutation(len(self._items))
        return self._items[int(self._order[position])]

    def score(self, completion: str, item: TaskItem) -> float:
        return 1.0 if completion.strip() == item.answer.strip() else 0.0


def _item(row: Row, place: str, config: RowsConfig) -> TaskItem:
    text, conversation = "", None
    prompt_key = config.messages_key or config.prompt_key or "prompt"
    if config.messages_key is None:
        text = text_in(row, prompt_key, place)
    else:
        tools = None if config.tools_key is None else tools_in(row, config.tools_key, place)
        conversation = Conversation.of(row.get(prompt_key), tools, place=place, key=prompt_key)
    answer = None
    if config.answer_key is not None:
        if config.answer_key not in row:
            raise ConfigError(
                f"{place}: nothing under {config.answer_key!r} (keys: {', '.join(map(str, row))}); add it, or name the "
                "key of answers by answer_key (null: rows have none)"
            )
        answer = row[config.answer_key]
    used = {prompt_key, config.tools_key, config.answer_key}
    if config.metadata_keys is None:
        metadata = {key: value for key, value in row.items() if key not in used}
    else:
        missing = [key for key in config.metadata_keys if key not in row]
        if missing:
            raise ConfigError(f"{place}: nothing under {missing[0]!r}; add it, or take it out of metadata_keys")
        metadata = {key: row[key] for key in config.metadata_keys}
    for key, value in ((config.answer_key, answer), *metadata.items()):
        _check_value(value, f"{place}: {key!r}")
    return TaskItem(text, answer, metadata, conversation, place)


def text_in(row: Row, key: str, place: str) -> str:
    """The text under `key`. `ConfigError` names what is there instead."""
    value = row.get(key)
    if isinstance(value, list):
        raise ConfigError(f"{place}: {key!r} is a list, not text; for messages, set messages_key to {key}")
    if isinstance(value, int | float):
        raise ConfigError(f"{place}: {key!r} is {json.dumps(value)[:40]}, not text; quote it")
    if not isinstance(value, str):
        raise ConfigError(
            f"{place}: no text under {key!r} (keys: {', '.join(map(str, row))}); name the key of prompts by prompt_key"
        )
    if not value:
        raise ConfigError(f"{place}: {key!r} is empty; write a prompt, or remove the row")
    check_characters(value, f"{place}: {key!r}")
    return value


def tools_in(row: Row, key: str, place: str) -> Any:
    """What is under `key`, read where it is JSON text."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ConfigError(f"{place}: {key!r} is text that is not JSON: {error}; write a list of JSON schemas") from None


def _check_value(value: Any, place: str) -> None:
    """Texts of answers and metadata travel as UTF-8."""
    if isinstance(value, str):
        check_characters(value, place)
    elif isinstance(value, dict):
        for name, child in value.items():
            _check_value(name, place)
            _check_value(child, place)
    elif isinstance(value, list):
        for child in value:
            _check_value(child, place)
