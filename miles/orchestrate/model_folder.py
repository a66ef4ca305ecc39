"""The model folder that a run starts from: the user's, or a small one made for the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from miles.config import ConfigError
from miles.config.files import storage_error
from miles.data.tokenizer import build_char_tokenizer
from miles.models.create import create_checkpoint
from miles.orchestrate.run_folder import RunFolder
from miles.orchestrate.warm_start import start_model
from miles.recipe import Recipe
from miles.recipe.created_tokenizer import created_tokenizer


def prepare_model(recipe: Recipe, folder: RunFolder) -> Path:
    """Path of a complete Hugging Face folder. Raises `ConfigError` when `model.path` is not one, or the phase before is
    not finished."""
    path = start_model(recipe)
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"model.path {path}: no such folder; give a Hugging Face model folder")
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise ConfigError(f"model.path {path}: {name} is missing; give a complete Hugging Face model folder")
        return path
    path = folder.created_model
    if path.is_dir():
        return path
    tokenizer_dir = folder.path / ".tokenizer"
    try:
        alphabet, chat = created_tokenizer(recipe)
        build_char_tokenizer(alphabet, tokenizer_dir, chat=chat)
        return create_checkpoint(
            path, family=recipe.model.family, shape=recipe.model.create, tokenizer_dir=tokenizer_dir, seed=recipe.seed
        )
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        shutil.rmtree(tokenizer_dir, ignore_errors=True)
