"""What a checkpoint folder holds, by its index and the headers of its shards; without torch.

Reads no tensor data; `miles.quant.convert.shards` does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.models.hf_files import is_shard_name
from miles.models.packed_experts import unpacked
from miles.models.safetensors_header import DAMAGED, Header, read_header
from miles.quant.errors import ConversionError

INDEX = "model.safetensors.index.json"
SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", "_proj_scale", "_proj_scale_2")
QUANTISED = ("U8", "I8", "F4", "F8_E4M3", "F8_E5M2")


def read_json(path: Path) -> dict:
    """A JSON object; ConversionError names the file."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read: {error.strerror}; give a file that exists") from error
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: not JSON: {error}; {DAMAGED}") from None
    if not isinstance(values, dict):
        raise ConversionError(f"{path}: holds a {type(values).__name__}, a JSON object is needed; {DAMAGED}")
    return values


def quantization_of(config: Mapping[str, Any], path: Path) -> dict:
    """`quantization_config` of a config.json, empty where there is none; ConversionError when it is no object."""
    value = config.get("quantization_config")
    if value is not None and not isinstance(value, dict):
        raise ConversionError(
            f"{path}: quantization_config is a {type(value).__name__}, a JSON object is needed; {DAMAGED}"
        )
    return value or {}


def shard_names(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """(file names in order, the index's weight map or None). Nothing is opened but the index."""
    index = directory / INDEX
    if not index.exists():
        return sorted(path.name for path in directory.glob("*.safetensors")), None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConversionError(f"{index}: has no weight_map from tensor names to files; {DAMAGED}")
    # A conversion writes shards of these names: one that leads elsewhere would overwrite the source.
    if strange := sorted(shard for shard in set(weight_map.values()) if not is_shard_name(shard)):
        raise ConversionError(
            f"{index}: weight_map names {strange[0]!a}, which is not the plain name of a *.safetensors file in this "
            f"folder; {DAMAGED}"
        )
    return sorted(set(weight_map.values())), weight_map


def read_headers(directory: Path) -> dict[str, Header]:
    """Header of every shard by file name; a tensor that two shards hold is an error."""
    names, weight_map = shard_names(directory)
    headers: dict[str, Header] = {}
    places: dict[str, str] = {}
    for shard in names:
        if not (directory / shard).exists():
            raise ConversionError(f"{directory / shard}: named in {INDEX} but missing; {DAMAGED}")
        headers[shard] = read_header(directory / shard, error=ConversionError)
        for tensor in headers[shard].tensors:
            if not _is_text(tensor):
                raise ConversionError(f"{directory / shard}: tensor name {tensor!a} is not text; {DAMAGED}")
            if tensor in places:
                raise ConversionError(f"{directory / shard}: {tensor} is also in {places[tensor]}; keep one of them")
            places[tensor] = shard
    if weight_map is not None and (lost := sorted(n for n, s in weight_map.items() if places.get(n) != s)):
        raise ConversionError(f"{directory / INDEX}: not in the shard it names: {', '.join(lost[:5])}; {DAMAGED}")
    return headers


def weight_names(directory: Path) -> list[str]:
    """Names of all tensors of a model folder; experts that a file packs into one tensor a layer are named one by one."""
    return [name for header in read_headers(directory).values() for name, _, _ in unpacked(header.tensors)]


def _is_text(name: str) -> bool:
    """Half a surrogate pair passes as JSON and can be neither written nor hashed."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def scaled_weight(name: str) -> str | None:
    """The weight that `name` is a scale of, by its name; None if it is no scale's name."""
    suffix = next((s for s in SCALES if name.endswith(s)), None)
    if suffix is None:
        return None
    return name.removesuffix(suffix) + (".weight" if suffix.startswith(".") else "_proj")


def quantised_weights(headers: Mapping[str, Header]) -> list[str]:
    """Weights stored in a quantised dtype, or that have a scale; in every naming that converters write."""
    found = set()
    for header in headers.values():
        for name, entry in header.tensors.items():
            weight = scaled_weight(name)
            if weight is not None:
                found.add(weight)
            elif entry.dtype in QUANTISED and "scale" not in name.rpartition(".")[2]:
                found.add(name)
    return sorted(found)
