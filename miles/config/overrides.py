"""Command-line overrides: `--set a.b=value` on top of a configuration mapping."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from miles.config.errors import ConfigError
from miles.config.validation import ModelType, validate
from miles.config.yaml_source import KeyPath, parse_scalar


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """Split `a.b=value`; the value is read as YAML (`0.1`, `true`, `[1, 2]`, `word`)."""
    key, separator, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not separator or not all(parts):
        raise ConfigError(f"--set {text}: write it as section.key=value")
    return parts, parse_scalar(value.strip())


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """A copy of `data` with the overrides applied in order, and the override text for each path set."""
    result = copy.deepcopy(data)
    origin: dict[KeyPath, str] = {}
    for text in overrides:
        path, value = parse_override(text)
        node: Any = result
        for part in path[:-1]:
            child = node.get(part)
            if child is None:
                child = node[part] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"--set {text}: '{part}' is a value, not a section")
            node = child
        node[path[-1]] = value
        origin[path] = f"--set {text}"
    return result, origin


def from_overrides(model: type[ModelType], overrides: Sequence[str]) -> ModelType:
    """A configuration of nothing but overrides; `ConfigError` names the one that is wrong."""
    data, origin = apply_overrides({}, overrides)
    return validate(
        model,
        data,
        locate=lambda key: next((origin[key[:n]] for n in range(len(key), 0, -1) if key[:n] in origin), None),
    )


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`: mappings merge key by key, everything else (lists too) replaces."""
    result = dict(base)
    for key, value in top.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
