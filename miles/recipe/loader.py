"""From a recipe file and overrides to a `Recipe`: extends < recipe < --set. Environment never changes a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.config import ConfigError, user_code
from miles.config.beside_recipe import with_absolute_paths
from miles.config.overrides import apply_overrides, merge
from miles.config.validation import validate
from miles.config.yaml_source import KeyPath, Position, YamlDocument, load_yaml
from miles.recipe.schema import Recipe


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and validate. Raises `ConfigError` listing every fault with file, line and column."""
    document = load_yaml(path)
    data, base = _with_base(path, document)
    data, origin = apply_overrides(data, overrides)
    # Those of --set: one rule for where a path begins.
    data = _with_absolute_files(data, path)

    def locate(key: KeyPath) -> Position | str | None:
        for end in range(len(key), 0, -1):
            if key[:end] in origin:
                return origin[key[:end]]
        below = [text for path, text in origin.items() if path[: len(key)] == key]
        if below and key not in document.positions and (base is None or key not in base.positions):
            return below[-1]
        if base is not None and key not in document.positions and key in base.positions:
            return base.locate(key)
        return document.locate(key)

    return validate(Recipe, data, locate=locate)


def _with_base(path: Path, document: YamlDocument) -> tuple[dict[str, Any], YamlDocument | None]:
    data = _with_absolute_files(document.data, path)
    if "extends" not in data:
        return data, None
    name = data.pop("extends")
    place = document.positions[("extends",)]
    if not isinstance(name, str):
        raise ConfigError(f"{place}: extends names one recipe file beside this one")
    try:
        base = load_yaml(path.parent / name)
    except ConfigError as error:
        raise ConfigError(f"{place}: extends {name}: {error}") from error
    if "extends" in base.data:
        raise ConfigError(f"{place}: {name} itself extends {base.data['extends']}; only one level is allowed")
    # What was recorded of the base says nothing about what is made of it.
    inherited = {key: value for key, value in base.data.items() if key != "validation"}
    return merge(_with_absolute_files(inherited, path.parent / name), data), base


def _with_absolute_files(data: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """A relative path begins at the folder of the file that names it."""
    return with_absolute_paths(Recipe, user_code.with_absolute_files(data, recipe.parent), recipe.parent)
