"""Strict YAML with positions.

`load_yaml` reads one mapping from a file and remembers where every key stands, so that a later
validation error can name file, line and column. It is stricter than YAML 1.1: duplicate keys, tabs,
anchors, tags, `yes`/`no` booleans, numbers out of range and non-UTF-8 bytes are errors; `2e-3` is a number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from miles.config.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DIGITS = 30
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?\Z")
# `on` and `off` are words of some options (`sync.checksum: off`); a boolean key refuses them by its type.
_NOT_BOOLEANS = frozenset({"yes", "no", "y", "n"})


@dataclass(frozen=True)
class Position:
    """Where a key or value stands; `line` and `column` count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class YamlDocument:
    """One YAML mapping: `data` in plain Python types, `positions` by key path."""

    data: dict[str, Any]
    positions: dict[KeyPath, Position]

    def locate(self, path: KeyPath) -> Position | None:
        """Position of the deepest known prefix of `path`."""
        for end in range(len(path), -1, -1):
            found = self.positions.get(path[:end])
            if found is not None:
                return found
        return None


def load_yaml(path: Path) -> YamlDocument:
    """Read a YAML mapping from `path`. Raises `ConfigError` naming file, line and fix."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_nearby(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: {len(raw)} bytes; a configuration file may have at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    return parse_yaml(text, name=str(path))


def parse_yaml(text: str, *, name: str) -> YamlDocument:
    """Parse `text` as one strict YAML mapping; `name` stands for the file in messages."""
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ConfigError(f"{name}:{number}:1: a tab is used for indentation; use spaces")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_hidden_values(text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply for a configuration; check for unclosed brackets") from None
    if root is None:
        raise ConfigError(f"{name}: the file is empty; it must hold a mapping")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}:1:1: the file must hold a mapping of keys to values")
    positions: dict[KeyPath, Position] = {}
    data = _construct(root, (), name, positions)
    return YamlDocument(data=data, positions=positions)


def parse_scalar(text: str) -> Any:
    """The value that `text` would have as a plain YAML value (used by command-line overrides)."""
    document = parse_yaml(f"value: {text}\n", name="--set")
    if len(document.data) != 1:
        raise ConfigError(f"--set: {text!r} holds more than one value; quote it, or give each its own --set")
    return document.data["value"]


def _refuse_hidden_values(text: str, name: str) -> None:
    """Anchors, aliases and tags make a value differ from what its line says."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            reason = "anchors and aliases hide where a value comes from; write the value out"
        elif (tag := getattr(event, "tag", None)) is not None:
            reason = f"tag {tag} is not read; remove it (quote a value to make it text)"
        else:
            continue
        mark = event.start_mark
        raise ConfigError(f"{name}:{mark.line + 1}:{mark.column + 1}: {reason}" if mark else f"{name}: {reason}")


def _construct(node: yaml.Node, path: KeyPath, name: str, positions: dict[KeyPath, Position]) -> Any:
    positions.setdefault(path, _position(node, name))
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _position(key_node, name)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                raise ConfigError(f"{place}: keys must be plain words")
            key = key_node.value
            if key in result:
                raise ConfigError(f"{place}: key '{key}' is given twice; keep one")
            positions[(*path, key)] = place
            result[key] = _construct(value_node, (*path, key), name, positions)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(child, (*path, index), name, positions) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, name)


def _scalar(node: yaml.ScalarNode, name: str) -> Any:
    text = node.value
    if node.style is not None:
        return text
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if text.lower() in _NOT_BOOLEANS:
        raise ConfigError(f"{_position(node, name)}: '{text}' is ambiguous; write true or false, or quote it")
    if _INTEGER.match(text) and len(text) <= MAX_DIGITS:
        return int(text)
    if _INTEGER.match(text) or (_FLOAT.match(text) and not math.isfinite(float(text))):
        raise ConfigError(f"{_position(node, name)}: {text[:40]} is out of range; write a smaller number, or quote it")
    if _FLOAT.match(text):
        return float(text)
    return text


def _position(node: yaml.Node, name: str) -> Position:
    return Position(name, node.start_mark.line + 1, node.start_mark.column + 1)


def _nearby(path: Path) -> str:
    from miles.config.names import nearest

    folder = path.parent
    if not folder.is_dir():
        return f" (folder {folder} does not exist)"
    match = nearest(path.name, [entry.name for entry in folder.iterdir()])
    return f"; did you mean {folder / match}?" if match else ""
