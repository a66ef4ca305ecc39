"""The model folder that a run starts from when an earlier phase makes it (`model.from_recipe`)."""

from __future__ import annotations

from pathlib import Path

from miles.config import ConfigError
from miles.orchestrate.run_folder import RunFolder, locate
from miles.recipe import Recipe
from miles.recipe.warm_start import first_recipe


def start_model(recipe: Recipe) -> Path | None:
    """The Hugging Face folder that exists before the run: `model.path`, or what the finished first phase exported.

    None for a run that makes its model. `ConfigError` when the first phase is not finished.
    """
    first = first_recipe(recipe)
    if first is None:
        return None if recipe.model.path is None else Path(recipe.model.path)
    run = first_run(first)
    if not run.result.exists():
        raise ConfigError(
            f"{run.path}: the run of model.from_recipe is not finished, so there is no model to start from; `miles train` "
            "with this recipe runs it first"
        )
    return run.exported_model


def first_run(first: Recipe) -> RunFolder:
    """Where the first phase runs."""
    return locate(first, ())
