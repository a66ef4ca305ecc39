"""Read a Hugging Face model folder into live parameter storage. No transformers import, torch only for weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.rollout.errors import EngineModelError

if TYPE_CHECKING:
    import torch


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineModelError(
            f"model folder {directory}: cannot read config.json ({error.strerror}); name a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise EngineModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise EngineModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise EngineModelError(f"{index}: no weight_map: {error}") from error
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise EngineModelError(
                f"model folder {directory}: {file.name} is missing; download or save the model again"
            )
    return files


def load_weights(directory: Path, parameters: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
    """Fill every parameter in place. An unknown, missing or misshaped tensor is an error that lists the names."""
    from safetensors import SafetensorError, safe_open

    waiting = set(parameters)
    unknown: list[str] = []
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name in aliases:
                        continue
                    if name not in parameters:
                        unknown.append(name)
                        continue
                    _copy(file, name, tensors.get_tensor(name), parameters[name])
                    waiting.discard(name)
        except (SafetensorError, OSError) as error:
            raise EngineModelError(
                f"{file}: damaged or truncated safetensors file ({error}); download or save the model again"
            ) from error
    if unknown:
        raise EngineModelError(f"{directory}: the model has no parameters named {', '.join(sorted(unknown))}")
    if waiting:
        raise EngineModelError(f"{directory}: weights are missing for {', '.join(sorted(waiting))}")


def _copy(file: Path, name: str, value: torch.Tensor, target: torch.Tensor) -> None:
    if value.shape != target.shape:
        raise EngineModelError(
            f"{file}: {name} has shape {list(value.shape)}, config.json asks for {list(target.shape)}"
        )
    target.copy_(value)
