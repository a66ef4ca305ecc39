"""Read a Hugging Face model folder into live parameter storage, as the trainer reads it. torch only for weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.models.errors import ModelError
from miles.models.family import read_hf_config
from miles.models.hf_files import HFCheckpoint
from miles.rollout.errors import EngineModelError

if TYPE_CHECKING:
    import torch


def read_config(directory: Path) -> dict[str, Any]:
    """config.json under main names; `EngineModelError` says what is wrong with the folder or the file."""
    try:
        return read_hf_config(directory)
    except ModelError as error:
        raise EngineModelError(str(error)) from error


def load_weights(directory: Path, parameters: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
    """Fill every parameter in place. An unknown, missing or misshaped tensor is an error that lists the names."""
    try:
        checkpoint = HFCheckpoint(directory)
        names = [name for name in checkpoint.names() if name not in aliases]
        unknown = sorted(set(names) - parameters.keys())
        if unknown:
            raise EngineModelError(f"{directory}: the model has no parameters named {', '.join(unknown)}")
        missing = sorted(parameters.keys() - set(names))
        if missing:
            raise EngineModelError(f"{directory}: weights are missing for {', '.join(missing)}")
        for name in names:
            checkpoint.check(name, parameters[name].shape)
            parameters[name].copy_(checkpoint.read(name))
        checkpoint.close()
    except ModelError as error:
        raise EngineModelError(str(error)) from error
