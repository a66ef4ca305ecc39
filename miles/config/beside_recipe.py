"""Paths in a recipe that begin at the recipe's folder, wherever the command is run.

A configuration class marks such a field by `BesideRecipe` in its annotation; the recipe's loader makes it absolute.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel


@dataclass(frozen=True)
class BesideRecipe:
    """`words`: values of the field that are no paths."""

    words: tuple[str, ...] = ()


RecipePath = Annotated[Path, BesideRecipe()]


def with_absolute_paths(model: type[BaseModel], data: Any, folder: Path) -> Any:
    """Plain data of `model` in which the marked paths are absolute: a relative one begins at `folder`."""
    if not isinstance(data, dict):
        return data
    found = dict(data)
    for name, field in model.model_fields.items():
        value = found.get(name)
        mark = _mark(field.annotation, field.metadata)
        if isinstance(value, dict):
            for child in _models(field.annotation):
                found[name] = with_absolute_paths(child, found[name], folder)
        elif isinstance(value, list):
            for child in _models(field.annotation):
                found[name] = [with_absolute_paths(child, item, folder) for item in found[name]]
        elif isinstance(value, str) and mark is not None and value and value not in mark.words:
            found[name] = str((folder / value).resolve())
    return found


def _mark(annotation: Any, metadata: Any) -> BesideRecipe | None:
    """The mark of a field, also where the marked type is one of several."""
    marks = [item for item in metadata if isinstance(item, BesideRecipe)]
    for inner in get_args(annotation):
        marks += [m for m in (_mark(inner, getattr(inner, "__metadata__", ())),) if m is not None]
    return marks[0] if marks else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
