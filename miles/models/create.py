"""Make a new, randomly initialised model as a real Hugging Face folder; needs numpy only.

Weights are drawn per tensor from (seed, tensor name), so they do not depend on order, mesh or library
versions of torch. Norm weights are one, all others normal(0, init_std).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from miles.config.json_text import parse_json
from miles.models import registry
from miles.models.config import ModelShape
from miles.models.errors import ModelError
from miles.models.hf_files import FolderWriter, copy_tokenizer_files, write_json

_SPECIAL = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}


def create_checkpoint(
    directory: Path, *, family: str = "qwen3", shape: ModelShape | None = None, tokenizer_dir: Path, seed: int
) -> Path:
    """Write config.json, model.safetensors, generation_config.json and the tokenizer's files to `directory`.

    The vocabulary size and the special token ids come from the tokenizer. Equal arguments give equal bytes.
    """
    shape = shape or ModelShape()
    vocab_size, special = read_tokenizer(tokenizer_dir)
    model_family = registry.by_name(family)
    hf = model_family.hf_config(shape, vocab_size, special)
    with FolderWriter(directory) as folder:
        copy_tokenizer_files(tokenizer_dir, folder)
        write_json(folder / "config.json", hf)
        known = {key: value for key, value in special.items() if value is not None}
        write_json(folder / "generation_config.json", known)
        tensors = {
            name: _initial(name, size, kind, shape.init_std, seed) for name, size, kind in model_family.shapes(hf)
        }
        _save(folder / "model.safetensors", tensors, shape.dtype)
    return directory


def read_tokenizer(directory: Path) -> tuple[int, dict[str, int | None]]:
    """(vocabulary size including added tokens, special token ids by config.json key) of a tokenizer folder."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = parse_json(path.read_text())
        settings_path = directory / "tokenizer_config.json"
        settings = parse_json(settings_path.read_text()) if settings_path.exists() else {}
    except FileNotFoundError:
        raise ModelError(f"{path}: file is missing; give a folder with a tokenizer.json") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{directory}: tokenizer files are not valid JSON: {error}") from None
    vocabulary = tokenizer["model"]["vocab"]
    ids: dict[str, int] = (
        dict(vocabulary)
        if isinstance(vocabulary, Mapping)
        else {token: index for index, (token, _) in enumerate(vocabulary)}
    )
    ids.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})
    special: dict[str, int | None] = {}
    for key, setting in _SPECIAL.items():
        token = settings.get(setting)
        text = token.get("content") if isinstance(token, Mapping) else token
        special[key] = ids[text] if text is not None and text in ids else None
    return max(ids.values()) + 1, special


def _initial(name: str, size: tuple[int, ...], kind: str, std: float, seed: int) -> np.ndarray[Any, Any]:
    if kind == "norm":
        return np.ones(size, dtype=np.float32)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return (generator.standard_normal(size, dtype=np.float32) * np.float32(std)).astype(np.float32)


def _save(path: Path, tensors: dict[str, np.ndarray[Any, Any]], dtype: str) -> None:
    if dtype == "float32":
        from safetensors.numpy import save_file

        save_file(tensors, path, metadata={"format": "pt"})
        return
    import torch
    from safetensors.torch import save_file as save_torch

    save_torch(
        {name: torch.from_numpy(value).to(getattr(torch, dtype)) for name, value in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
