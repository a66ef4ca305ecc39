"""Headers of safetensors files, read without torch and checked against the file's size. No tensor data is read."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.errors import ConfigError
from miles.models.errors import ModelError

# The format's own bound on a header.
MAX_HEADER = 100_000_000
DAMAGED = "copy or download the file again"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: safetensors dtype, shape, and its first and last byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """`tensors` by name in the file's order, `metadata`, and `data`: the offset where tensor bytes begin."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data: int
    raw: bytes


def read_header(path: Path, *, error: type[ConfigError] = ModelError) -> Header:
    """Header of a whole file; `error` names the file, what is wrong with it and what to do."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise error(f"{path}: truncated safetensors file: {size} bytes, no header; {DAMAGED}")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER:
                raise error(
                    f"{path}: not a safetensors file: its first bytes give a header of {length} bytes; {DAMAGED}"
                )
            if length > size - 8:
                raise error(
                    f"{path}: truncated safetensors file: the header needs {8 + length} bytes, the file has {size}; "
                    + DAMAGED
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise error(f"{path}: file is missing; {DAMAGED}") from None
    except IsADirectoryError:
        raise error(f"{path}: is a folder, not a safetensors file; put the file itself there") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}; make it a file that you may read") from None
    try:
        tensors, metadata = _parse(json.loads(raw))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not a safetensors file: {problem}; {DAMAGED}") from None
    data = 8 + length
    last, name = max(((entry.end, name) for name, entry in tensors.items()), default=(0, ""))
    if size < data + last:
        raise error(
            f"{path}: truncated safetensors file at tensor {name}: expected {data + last} bytes, got {size}; {DAMAGED}"
        )
    if size > data + last:
        raise error(f"{path}: longer than its header says, {size} bytes instead of {data + last}; {DAMAGED}")
    return Header(tensors, metadata, data, raw)


def _parse(fields: Any) -> tuple[dict[str, Entry], dict[str, str]]:
    if not isinstance(fields, dict):
        raise ValueError(f"its header is a {type(fields).__name__}")
    metadata = fields.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ValueError("its __metadata__ is not an object")
    for name, entry in fields.items():
        if not _is_entry(entry):
            raise ValueError(f"its header does not describe tensor {name}")
    return {
        name: Entry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in fields.items()
    }, metadata


def _is_entry(entry: object) -> bool:
    """{dtype: text, shape: [size...], data_offsets: [start, end]}, sizes and offsets not negative."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(size) is int and size >= 0 for size in (*shape, *offsets)) and offsets[0] <= offsets[1]
