"""Which family trains a checkpoint: by `model_type` and `architectures` of its config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from miles.data.chat import ChatFormat
from miles.models.errors import ModelError, UnsupportedModelError
from miles.models.family import Family

# model_type -> package below miles.models that holds it
_FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3_moe"}


def families() -> tuple[str, ...]:
    """Names of the supported families."""
    return tuple(sorted(_FAMILIES.values()))


def by_name(name: str) -> Family:
    """The family called `name`; an unknown name lists the supported ones."""
    if name not in _FAMILIES.values():
        raise UnsupportedModelError(f"model family {name!r} is unknown; supported: {', '.join(families())}")
    return importlib.import_module(f"miles.models.{name}.weights").FAMILY


def chat_format(name: str) -> ChatFormat:
    """How models of the family called `name` that are made here are talked to."""
    by_name(name)
    return importlib.import_module(f"miles.models.{name}.chat").FORMAT


def resolve(hf_config: Mapping[str, Any], *, where: str = "config.json") -> Family:
    """The family of a parsed config.json. Unknown model types and architectures list the supported ones."""
    model_type = hf_config.get("model_type")
    if model_type is None:
        raise ModelError(f"{where}: model_type is missing")
    if model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"{where}: model_type {model_type!r} has no family; supported: {', '.join(sorted(_FAMILIES))}"
        )
    family = by_name(_FAMILIES[model_type])
    architectures = hf_config.get("architectures") or []
    if not set(architectures) & set(family.architectures):
        raise UnsupportedModelError(
            f"{where}: architectures {architectures!r} of model_type {model_type!r} is not trained here; "
            f"supported: {', '.join(family.architectures)}"
        )
    return family
