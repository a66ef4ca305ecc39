"""From plain data to a typed configuration, with every error at once and each at its place."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from miles.config.errors import ConfigError
from miles.config.names import suggestion
from miles.config.yaml_source import KeyPath

MAX_SHOWN = 120

ModelType = TypeVar("ModelType", bound=BaseModel)


def validate(model: type[ModelType], data: Any, *, locate: Callable[[KeyPath], Any]) -> ModelType:
    """Build `model` from `data`; raise one `ConfigError` that lists every fault with its place.

    `locate` maps a key path to something printable (a `Position`, or `--set a.b=c`), or None.
    """
    try:
        # JSON mode: strict about numbers and booleans, yet a YAML list may fill a tuple and a string a path.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        lines = [_describe(model, data, item, locate) for item in error.errors(include_url=False)]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def field_names(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Names that the configuration at `path` below `model` accepts; empty where it is no model."""
    current: list[Any] = [model]
    for part in path:
        current = [below for annotation in current for below in _below(annotation, part)]
    models = [kind for annotation in current for kind in _models_in(annotation)]
    return list(models[0].model_fields) if models else []


def _below(annotation: Any, part: str | int) -> list[Any]:
    """Annotations reached from `annotation` by one part of a key path: a field, an index, a key or a union's tag."""
    if typing.get_origin(annotation) in (list, tuple, dict):
        return list(typing.get_args(annotation)[-1:])
    models = _models_in(annotation)
    tagged = [m for m in models if any(part in _literals(f.annotation) for f in m.model_fields.values())]
    if len(models) > 1 and tagged:
        return tagged
    return [m.model_fields[part].annotation for m in models if part in m.model_fields]


def _literals(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return [model for part in typing.get_args(annotation) for model in _models_in(part)]
    return []


def _shown(value: Any) -> str:
    """`value` as it stands in a message: a whole section or a long text is cut."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _describe(model: type[BaseModel], data: Any, item: Any, locate: Callable[[KeyPath], Any]) -> str:
    path: KeyPath = tuple(item["loc"])
    dotted = ".".join(str(part) for part in path)
    kind = item["type"]
    given = item.get("input")
    if kind == "extra_forbidden":
        text = f"unknown key '{dotted}'; {suggestion(str(path[-1]), field_names(model, path[:-1]))}"
    elif kind == "missing":
        text = f"'{dotted}' is required and missing"
    elif kind in ("value_error", "assertion_error"):
        reason = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        text = f"{dotted}: {reason}" if dotted else reason
    elif kind == "json_invalid":
        deep = "recursion" in item["msg"]
        text = "nested too deeply for a configuration; check for unclosed brackets" if deep else item["msg"]
    elif kind == "literal_error":
        allowed = item["ctx"]["expected"]
        text = f"{dotted}: {_shown(given)} is not allowed; use {allowed}"
    else:
        text = f"{dotted}: {item['msg'][0].lower()}{item['msg'][1:]}, got {_shown(given)}"
    place = locate(path)
    return f"{place}: {text}" if place is not None else text
