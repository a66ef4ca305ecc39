"""What changed between two weight versions, as one safetensors file: each tensor whole or sparse, whichever is smaller.

    delta_<base>_<v>.safetensors    <name>/full | <name>/idx (int32 or int64) + <name>/val
    metadata                        schema, run_id, base, version, tensors: {name: [shape, base digest, result digest]}

Changes are bitwise. A reader checks the digest of the tensor it starts from and of the result, so a wrong base, a
missing link or a damaged file is noticed before anything of it is served.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles.config.files import sync_folder
from miles.config.json_text import parse_json
from miles.weight_wire.bucket import SCHEMA, WeightWireError, digest

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WrittenDelta:
    """A finished file; `nbytes` is its size."""

    path: Path
    nbytes: int


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers of the same width, flat: equality of bits, not of numbers (NaN, signed zero)."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_BITS[flat.element_size()])


def write_delta(
    parent: Path,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    run_id: str,
    base: int,
    version: int,
) -> WrittenDelta:
    """Both maps hold the same names, shapes and dtypes on the CPU. Temporary name, fsync, rename."""
    arrays: dict[str, torch.Tensor] = {}
    table: dict[str, list[object]] = {}
    for name, tensor in new.items():
        before, after = bits_of(old[name]), bits_of(tensor)
        index = torch.nonzero(before != after).view(-1)
        kind = torch.int32 if after.numel() < 2**31 else torch.int64
        if index.numel() * (kind.itemsize + tensor.element_size()) < after.numel() * tensor.element_size():
            arrays[f"{name}/idx"] = index.to(kind)
            arrays[f"{name}/val"] = tensor.detach().contiguous().view(-1)[index]
        else:
            arrays[f"{name}/full"] = tensor.detach().contiguous()
        table[name] = [list(tensor.shape), hex(digest(old[name])), hex(digest(tensor))]
    metadata = {"schema": str(SCHEMA), "run_id": run_id, "base": str(base), "version": str(version)}
    path = parent / f"delta_{base}_{version}.safetensors"
    partial = parent / f".{path.name}.tmp"
    try:
        save_file(arrays, partial, metadata={**metadata, "tensors": json.dumps(table)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(parent)
    return WrittenDelta(path, path.stat().st_size)


class WeightDelta:
    """Reader of one delta. `shapes`: name -> shape; `apply(name, current)` gives the new tensor."""

    def __init__(self, path: Path, *, run_id: str, base: int, version: int):
        try:
            self._file = safe_open(path, framework="pt")
            metadata = self._file.metadata()
            found = tuple(metadata[key] for key in ("schema", "run_id", "base", "version"))
            self._table: dict[str, list[Any]] = parse_json(metadata["tensors"])
            self.shapes = {name: tuple(row[0]) for name, row in self._table.items()}
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise WeightWireError(f"{path}: not a weight delta: {error!r}") from error
        expected = (str(SCHEMA), run_id, str(base), str(version))
        if found != expected:
            raise WeightWireError(f"{path}: holds (schema, run, base, version) {found}, expected {expected}")
        self._path = path
        self._keys = set(self._file.keys())

    def apply(self, name: str, current: torch.Tensor) -> torch.Tensor:
        """`current` (of the base version) with the changes; `WeightWireError` if it is not the base or the result is wrong."""
        _, before, after = self._table[name]
        if hex(digest(current)) != before:
            raise WeightWireError(f"{self._path}: {name} of this engine is not the base this delta starts from")
        if f"{name}/full" in self._keys:
            result = self._file.get_tensor(f"{name}/full")
        else:
            result = current.detach().to("cpu", copy=True).contiguous().view(-1)
            result[self._file.get_tensor(f"{name}/idx").long()] = self._file.get_tensor(f"{name}/val")
            result = result.view(current.shape)
        if result.shape != current.shape or hex(digest(result)) != after:
            raise WeightWireError(f"{self._path}: {name} has the wrong digest after the delta; the file is damaged")
        return result
