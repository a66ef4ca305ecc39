"""Recipes and folders small enough to make in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.recipe.schema import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Makes a recipe whose runs lie below the test's folder; sections are given as keywords."""

    def make(**sections: Any) -> Recipe:
        run = {"directory": str(tmp_path / "runs"), **sections.pop("run", {})}
        return Recipe.model_validate_json(json.dumps({"name": "tiny", "run": run, **sections}))

    return make
