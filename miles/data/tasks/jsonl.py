"""Prompts from a JSON-lines file, reshuffled each epoch by a seed; the exact answer scores 1."""

from __future__ import annotations

import json

import numpy as np

from miles.config import ConfigError
from miles.data.config import JsonlConfig
from miles.data.tasks import TaskItem


class JsonlFile:
    name = "jsonl"

    def __init__(self, config: JsonlConfig, seed: int) -> None:
        self._items = _read(config)
        self.size: int | None = len(self._items)
        self.alphabet = "".join(sorted({c for item in self._items for c in item.text + item.answer}))
        self._seed, self._shuffle = seed, config.shuffle
        self._epoch, self._order = -1, np.arange(len(self._items))

    def item(self, index: int) -> TaskItem:
        epoch, position = divmod(index, len(self._items))
        if self._shuffle and epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(key=self._seed, counter=epoch << 64))
            self._epoch, self._order = epoch, rng.permutation(len(self._items))
        return self._items[int(self._order[position])]

    def score(self, completion: str, item: TaskItem) -> float:
        return 1.0 if completion.strip() == item.answer.strip() else 0.0


def _read(config: JsonlConfig) -> list[TaskItem]:
    try:
        # Only a newline ends a row: text may hold the other line ends of Unicode. A byte order mark is passed over.
        lines = config.path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.jsonl.path: cannot read {config.path}: {error}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{config.path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
        except ValueError as error:
            raise ConfigError(f"{place}: a number has too many digits to be read; quote it to make it text") from error
        except RecursionError as error:
            raise ConfigError(f"{place}: nested too deeply; write a row of a few levels") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: expected a JSON object, got {type(row).__name__}")
        for key in (config.prompt_key, config.answer_key):
            value = row.get(key)
            if isinstance(value, int | float):
                raise ConfigError(f"{place}: {key!r} is {json.dumps(value)[:40]}, not text; quote it")
            if not isinstance(value, str):
                raise ConfigError(f"{place}: no text under {key!r} (keys: {', '.join(map(str, row))})")
            half = next((c for c in value if "\ud800" <= c <= "\udfff"), None)
            if half is not None:
                raise ConfigError(
                    f"{place}: {key!r} holds \\u{ord(half):04x}, half of a surrogate pair and no character; write "
                    "the character itself or both halves"
                )
        metadata = {k: v for k, v in row.items() if k not in (config.prompt_key, config.answer_key)}
        items.append(TaskItem(row[config.prompt_key], row[config.answer_key], metadata))
    if not items:
        raise ConfigError(f"data.jsonl.path: {config.path} holds no prompts; write one JSON object a line")
    return items
