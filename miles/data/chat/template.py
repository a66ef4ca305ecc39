"""The chat template of a tokenizer or of a file, with the special tokens that it may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.config import ConfigError
from miles.config.json_text import read_object

# The largest templates in use have a fiftieth of it.
MAX_BYTES = 1 << 20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatFormat:
    """How models of a family are talked to, for those that are made here. `turn_end` ends an answer.

    `special`: the further tokens that the template writes.
    """

    template: str
    turn_end: str
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """`source` is Jinja, `with_tools` the one for conversations with tools where a tokenizer has two.

    `variables`: what it may name beside messages and tools; special tokens first, keyword arguments win.
    """

    source: str
    where: str
    with_tools: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def read_template(folder: Path, *, file: Path | None, arguments: Mapping[str, Any]) -> ChatTemplate:
    """The template in `file`, or the one of the tokenizer in `folder`. `ConfigError` when there is none."""
    settings = _settings(folder)
    variables = {**_special_tokens(folder, settings), **arguments}
    if file is not None:
        return ChatTemplate(_read(file, "data.chat_template"), str(file), variables=variables)
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        tools = folder / "additional_chat_templates" / "tool_use.jinja"
        with_tools = _read(tools, "tokenizer") if tools.is_file() else None
        return ChatTemplate(_read(beside, "tokenizer"), str(beside), with_tools, variables)
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    default, with_tools = (found.get("default"), found.get("tool_use")) if isinstance(found, dict) else (found, None)
    if not isinstance(default, str) or not (with_tools is None or isinstance(with_tools, str)):
        said = "is missing" if found is None else "has no default template that is text"
        raise ConfigError(f"{where} {said}, and the data holds messages; set data.chat_template to a Jinja file")
    if max(len(default), len(with_tools or "")) > MAX_BYTES:
        raise ConfigError(f"{where} is above {MAX_BYTES >> 20} MiB; set data.chat_template to a smaller Jinja file")
    return ChatTemplate(default, where, with_tools, variables)


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name, as `transformers` gives them to templates: the older file counts only beside the older form."""
    named = dict(settings)
    older = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and older.is_file():
        named |= _object(older)
    found = {}
    for name in _NAMED_TOKENS:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _object(path) if path.is_file() else {}


def _object(path: Path) -> dict[str, Any]:
    return read_object(path, option="tokenizer", remedy="take the files from the same tokenizer")


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{option}: {path} is above {MAX_BYTES >> 20} MiB; give a chat template in Jinja")
        # Line ends as Python's text files have them, which `transformers` reads templates with.
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot read {path}: {error.strerror}; a relative path begins at the recipe's folder"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is no UTF-8 text: {error}; save it as UTF-8") from None
