"""Keys of a recipe, for the tests of pages that name them."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = section_of(field.annotation)
        if below is None:
            yield prefix + name
        else:
            yield from keys(below, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section behind `Section` or `Section | None`; lists and mappings are leaves."""
    kinds = [
        annotation,
        *(typing.get_args(annotation) if typing.get_origin(annotation) not in (list, tuple, dict) else ()),
    ]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
