"""`model.from_recipe`: the recipe of an earlier phase, whose exported model a run starts from."""

from __future__ import annotations

from miles.config import ConfigError
from miles.recipe.loader import load
from miles.recipe.schema import Recipe


def first_recipe(recipe: Recipe) -> Recipe | None:
    """The recipe of the phase before, with its runs below the same folder; None where there is none.

    `ConfigError` for one that cannot be read, has a phase before it in its turn, makes a model of another shape, or
    would run in the same folder.
    """
    path = recipe.model.from_recipe
    if path is None:
        return None
    try:
        first = load(path)
    except ConfigError as error:
        raise ConfigError(f"model.from_recipe {path}: {error}") from error
    if first.model.from_recipe is not None:
        raise ConfigError(
            f"model.from_recipe {path}: it has model.from_recipe itself, and only one phase may come before another; train "
            "it first and name its hf_model by model.path"
        )
    if first.name == recipe.name:
        raise ConfigError(f"model.from_recipe {path}: both recipes are called {recipe.name}; give one another name")
    made = recipe.model.create
    if made not in (type(made)(), first.model.create) or (first.model.path is not None and made != type(made)()):
        raise ConfigError(
            f"model.create is not that of model.from_recipe {path}, whose model this run starts from; remove it, or make "
            "both equal"
        )
    run = first.run.model_copy(update={"directory": recipe.run.directory or first.run.directory})
    return first.model_copy(update={"run": run})


def origin(recipe: Recipe) -> Recipe:
    """The recipe whose `model` section says which model there is at the very beginning: the first phase's."""
    return first_recipe(recipe) or recipe
