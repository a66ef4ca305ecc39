"""Headers of safetensors files, without torch: what a checkpoint folder holds and what its shards say of themselves.

Reads no tensor data; `miles.quant.convert.shards` does that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.quant.errors import ConversionError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20
DAMAGED = "copy or download the file again"
SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", "_proj_scale", "_proj_scale_2")
QUANTISED = ("U8", "I8", "F4", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: safetensors dtype, shape, and its first and last byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """`tensors` by name in the file's order, `metadata`, and `data`: the offset where tensor bytes begin."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data: int
    raw: bytes


def read_header(path: Path) -> Header:
    """Header of a whole file; ConversionError names the file, what is wrong with it and what to do."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
            if length > min(MAX_HEADER, size - 8):
                raise ConversionError(f"{path}: no safetensors header in its {size} bytes; {DAMAGED}")
            raw = file.read(length)
    except FileNotFoundError:
        raise ConversionError(f"{path}: the file is missing; {DAMAGED}") from None
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read: {error.strerror}") from error
    tensors, metadata = _parse(path, raw)
    end = max((entry.end for entry in tensors.values()), default=0)
    if size != 8 + length + end:
        kind = "truncated" if size < 8 + length + end else "longer than its header says"
        raise ConversionError(f"{path}: {kind}, {size} bytes where the header needs {8 + length + end}; {DAMAGED}")
    return Header(tensors, metadata, 8 + length, raw)


def _parse(path: Path, raw: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        fields = json.loads(raw)
        metadata = dict(fields.pop("__metadata__", None) or {})
        tensors = {}
        for name, entry in fields.items():
            begin, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            if not 0 <= begin <= end or min(shape, default=0) < 0:
                raise ValueError(f"{name} has offsets [{begin}, {end}] and shape {list(shape)}")
            tensors[name] = Entry(str(entry["dtype"]), shape, begin, end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: not a safetensors header: {error!r}; {DAMAGED}") from None
    return tensors, metadata


def read_json(path: Path) -> dict:
    """A JSON object; ConversionError names the file."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read: {error.strerror}; give a file that exists") from error
    except ValueError as error:
        raise ConversionError(f"{path}: not JSON: {error}; {DAMAGED}") from None
    if not isinstance(values, dict):
        raise ConversionError(f"{path}: holds a {type(values).__name__}, a JSON object is needed; {DAMAGED}")
    return values


def shard_names(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """(file names in order, the index's weight map or None). Nothing is opened but the index."""
    index = directory / INDEX
    if not index.exists():
        return sorted(path.name for path in directory.glob("*.safetensors")), None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConversionError(f"{index}: has no weight_map from tensor names to files; {DAMAGED}")
    return sorted(set(weight_map.values())), weight_map


def read_headers(directory: Path) -> dict[str, Header]:
    """Header of every shard by file name; a tensor that two shards hold is an error."""
    names, weight_map = shard_names(directory)
    headers: dict[str, Header] = {}
    places: dict[str, str] = {}
    for shard in names:
        if not (directory / shard).exists():
            raise ConversionError(f"{directory / shard}: named in {INDEX} but missing; {DAMAGED}")
        headers[shard] = read_header(directory / shard)
        for tensor in headers[shard].tensors:
            if tensor in places:
                raise ConversionError(f"{directory / shard}: {tensor} is also in {places[tensor]}; keep one of them")
            places[tensor] = shard
    if weight_map is not None and (lost := sorted(n for n, s in weight_map.items() if places.get(n) != s)):
        raise ConversionError(f"{directory / INDEX}: not in the shard it names: {', '.join(lost[:5])}; {DAMAGED}")
    return headers


def quantised_weights(headers: Mapping[str, Header]) -> list[str]:
    """Weights stored in a quantised dtype, or that have a scale; in every naming that converters write."""
    found = set()
    for header in headers.values():
        for name, entry in header.tensors.items():
            scale = next((s for s in SCALES if name.endswith(s)), None)
            if scale is not None:
                found.add(name.removesuffix(scale) + (".weight" if scale.startswith(".") else "_proj"))
            elif entry.dtype in QUANTISED and "scale" not in name.rpartition(".")[2]:
                found.add(name)
    return sorted(found)
