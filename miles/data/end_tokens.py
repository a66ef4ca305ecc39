"""Where an answer ends: every token that config.json, generation_config.json or the tokenizer names as its end.

The three are written by different hands and disagree in many published folders. What can be true at once is joined
and noted; an id that the model or the tokenizer cannot mean as an end is an error with what each of them says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config import ConfigError

_MODEL, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "the tokenizer"


@dataclass(frozen=True)
class EndTokens:
    """`ids`: ascending, empty when nothing names one. `note`: what the files say, where they do not agree."""

    ids: tuple[int, ...]
    note: str | None = None


def read_end_tokens(folder: Path) -> EndTokens:
    """End tokens of a model folder; without tokenizer files, of its two configurations.

    `ConfigError` names the three and their values when an id is none, is outside the vocabulary, has no token or is
    an ordinary piece of text, and when the tokenizer's files give a token two ids.
    """
    config = _object(folder / _MODEL)
    named = {_MODEL: _ids(config, folder / _MODEL)}
    if (folder / _GENERATION).exists():
        named[_GENERATION] = _ids(_object(folder / _GENERATION), folder / _GENERATION)
    vocabulary = _Vocabulary(folder) if (folder / "tokenizer.json").is_file() else None
    if vocabulary is not None:
        named[_TOKENIZER] = vocabulary.ends
    found = sorted(set().union(*named.values()))
    for index in found:
        wrong = _objection(index, config, vocabulary)
        if wrong is not None:
            raise ConfigError(
                f"{folder}: end token {index} {wrong}; {_spelled(named, vocabulary)}; correct eos_token_id in the file "
                "that names it, or use the tokenizer that the model was trained with"
            )
    # generation_config.json is the file that is meant to say it; without one, config.json is.
    if set(found) == named.get(_GENERATION, named[_MODEL]):
        return EndTokens(tuple(found))
    listed = ", ".join(map(str, found))
    return EndTokens(tuple(found), f"{folder}: {_spelled(named, vocabulary)}; an answer ends at any of them ({listed})")


class _Vocabulary:
    """What the tokenizer's files say of ends. `ends`: ids that tokenizer_config.json and special_tokens_map.json name."""

    def __init__(self, folder: Path) -> None:
        from miles.data.tokenizer import Tokenizer

        self._tokenizer = Tokenizer(folder)
        self._added = self._tokenizer.added_tokens
        self.ends = {self._tokenizer.eos_id}
        settings = _object(folder / "tokenizer_config.json")
        self._check_ids(settings, folder)
        if (folder / "special_tokens_map.json").exists():
            special = _object(folder / "special_tokens_map.json").get("eos_token")
            text = special.get("content") if isinstance(special, dict) else special
            if isinstance(text, str):
                self.ends.add(self._require_id(text, folder))

    def text(self, index: int) -> str | None:
        return self._tokenizer.text_of(index)

    def is_ordinary(self, index: int) -> bool:
        """A piece of text like any other, which no file marks as a token of its own."""
        return index not in self.ends and index not in self._added

    def _require_id(self, text: str, folder: Path) -> int:
        index = self._tokenizer.id_of(text)
        if index is None:
            raise ConfigError(f"{folder}/special_tokens_map.json: names eos_token {text!r}, not in the vocabulary")
        return index

    def _check_ids(self, settings: Mapping[str, Any], folder: Path) -> None:
        stated = settings.get("added_tokens_decoder") or {}
        for index, token in stated.items() if isinstance(stated, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            known = self._tokenizer.id_of(text) if isinstance(text, str) else None
            if known in self.ends and str(known) != str(index):
                raise ConfigError(
                    f"{folder}: the end token {text!r} is {index} in tokenizer_config.json and {known} in "
                    "tokenizer.json; take both files from the same tokenizer"
                )


def _objection(index: int, config: Mapping[str, Any], vocabulary: _Vocabulary | None) -> str | None:
    size = config.get("vocab_size")
    if isinstance(size, int) and index >= size:
        return f"is outside the model's vocabulary of {size}"
    if vocabulary is None:
        return None
    text = vocabulary.text(index)
    if text is None:
        return "has no token in the tokenizer"
    if vocabulary.is_ordinary(index):
        return f"is the ordinary token {text!r}, at which any answer could be cut"
    return None


def _spelled(named: Mapping[str, set[int]], vocabulary: _Vocabulary | None) -> str:
    def one(index: int) -> str:
        text = None if vocabulary is None else vocabulary.text(index)
        return str(index) if text is None else f"{index} ({text!r})"

    return ", ".join(
        f"{name} names {' and '.join(map(one, sorted(ids))) if ids else 'no end token'}" for name, ids in named.items()
    )


def _ids(values: Mapping[str, Any], where: Path) -> set[int]:
    value = values.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for index in listed:
        if type(index) is not int or index < 0:
            raise ConfigError(f"{where}: eos_token_id {value!r} must be a token id, a list of them or null")
    return set(listed)


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return values
