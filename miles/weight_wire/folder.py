"""Weights of one version in a folder, complete and verified or not there at all.

    weights_<v>/  model-00001.safetensors ...  model.safetensors.index.json  DONE

Hugging Face names and safetensors, so that other engines can load it too. `DONE` is written last and holds run,
version, and size and digest of every file; the folder gets its name by one rename. A reader trusts nothing before
all of that is checked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles.config.files import sync_folder, write_atomic
from miles.config.json_text import parse_json
from miles.weight_wire.bucket import SCHEMA, WeightWireError, digest

DONE, INDEX = "DONE", "model.safetensors.index.json"


@dataclass(frozen=True)
class WrittenFolder:
    path: Path
    nbytes: int
    tensors: int
    files: int


def folder_name(version: int) -> str:
    return f"weights_{version}"


def write_folder(
    parent: Path, weights: Iterable[tuple[str, torch.Tensor]], *, run_id: str, version: int, shard_bytes: int
) -> WrittenFolder:
    """Stream tensors into `parent/weights_<version>`; at most about `shard_bytes` are held at a time.

    A folder of that name is replaced. `OSError` when the disk is full or unwritable; nothing final is left then.
    """
    final, partial = parent / folder_name(version), parent / f".{folder_name(version)}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    size = total = files = 0
    try:
        for name, tensor in weights:
            nbytes = tensor.numel() * tensor.element_size()
            if held and size + nbytes > shard_bytes:
                files += 1
                _write_shard(partial, files, held, weight_map)
                held, size = {}, 0
            # A copy: the trainer may write into its tensor before the shard is complete.
            held[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size, total = size + nbytes, total + nbytes
        files += 1
        _write_shard(partial, files, held, weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomic(partial / INDEX, json.dumps(index, indent=1) + "\n")
        sums = {f.name: {"nbytes": f.stat().st_size, "digest": hex(file_digest(f))} for f in sorted(partial.iterdir())}
        done = {"schema": SCHEMA, "run_id": run_id, "version": str(version), "files": sums}
        write_atomic(partial / DONE, json.dumps(done, indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_folder(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return WrittenFolder(final, total, len(weight_map), files)


class WeightFolder:
    """Reader of a verified folder. `shapes`: name -> shape; `tensor(name)` reads one array."""

    def __init__(self, path: Path, *, run_id: str, version: int):
        """`WeightWireError` for a missing or incomplete folder, another run or version, or a digest that differs."""
        self._files = _verified_files(path, run_id, version)
        self._handles: dict[str, Any] = {}
        self._where: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files:
            if file.suffix != ".safetensors":
                continue
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightWireError(f"{file}: not a safetensors file: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                self._where[name] = handle
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)


def file_digest(path: Path) -> int:
    """`digest` of a file's bytes."""
    if path.stat().st_size == 0:
        return 0
    return digest(torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8))


def _verified_files(path: Path, run_id: str, version: int) -> list[Path]:
    try:
        done = parse_json((path / DONE).read_text(encoding="utf-8"))
        found = (done["schema"], done["run_id"], done["version"])
        if found != (SCHEMA, run_id, str(version)):
            raise WeightWireError(
                f"{path}: holds (schema, run, version) {found}, expected {(SCHEMA, run_id, str(version))}"
            )
        for name, expected in done["files"].items():
            file = path / name
            if file.stat().st_size != expected["nbytes"] or hex(file_digest(file)) != expected["digest"]:
                raise WeightWireError(f"{file}: size or digest differs from what was written")
        return [path / name for name in done["files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightWireError(f"{path}: not a complete weight folder: {error!r}") from error


def _write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor], weight_map: dict[str, str]) -> None:
    name = f"model-{number:05d}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    with open(folder / name, "rb") as file:
        os.fsync(file.fileno())
    weight_map.update(dict.fromkeys(tensors, name))
