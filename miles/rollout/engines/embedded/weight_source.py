"""Where an engine's disk updates read from: a full weight folder, or a base and the chain of deltas that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles.weight_wire.bucket import WeightWireError, parse_version
from miles.weight_wire.delta import WeightDelta
from miles.weight_wire.folder import WeightFolder


@dataclass(frozen=True)
class NamedWeights:
    """Whole tensors by Hugging Face name. `read(name, current)` may start from what the engine holds."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, torch.Tensor], torch.Tensor]


def open_source(message: dict[str, Any], run_id: str, version: int, holds: tuple[str | None, int]) -> NamedWeights:
    """Check and open what an update message names. `holds`: (run id, version) that the engine last finished.

    load_format `safetensors`: the folder `model_path`. `miles_delta`: if the engine holds a version that the chain
    passes through, only the later deltas; else the base folder and all of them. `WeightWireError` when a part is
    missing, damaged or of another run.
    """
    path = _path(message.get("model_path"))
    load_format = message.get("load_format")
    if load_format == "safetensors":
        return _whole(WeightFolder(path, run_id=run_id, version=version))
    if load_format != "miles_delta":
        raise WeightWireError(f"load_format {load_format!r}: this engine reads 'safetensors' and 'miles_delta'")
    base, chain = parse_version(message.get("base_version")), _chain(message.get("deltas"))
    reached = [base, *(after for _, _, after in chain)]
    if [before for _, before, _ in chain] != reached[:-1] or reached[-1] != version:
        raise WeightWireError(f"delta chain {reached} from {base} does not lead to version {version} link by link")
    held = holds[1] if holds[0] == run_id and holds[1] in reached[:-1] else None
    source = None if held is not None else _whole(WeightFolder(path, run_id=run_id, version=base))
    links = [
        WeightDelta(file, run_id=run_id, base=before, version=after)
        for file, before, after in chain
        if held is None or before >= held
    ]
    return _with_deltas(source, links)


def _whole(folder: WeightFolder) -> NamedWeights:
    return NamedWeights(folder.shapes, lambda name, current: folder.tensor(name))


def _with_deltas(source: NamedWeights | None, links: list[WeightDelta]) -> NamedWeights:
    def read(name: str, current: torch.Tensor) -> torch.Tensor:
        value = current if source is None else source.read(name, current)
        for link in links:
            value = link.apply(name, value)
        return value

    return NamedWeights(links[-1].shapes, read)


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise WeightWireError(f"update_weights_from_disk needs an absolute path, got {value!r:.80}")
    return Path(value)


def _chain(value: Any) -> list[tuple[Path, int, int]]:
    if not isinstance(value, list) or not value:
        raise WeightWireError("miles_delta needs deltas: [[path, base version, version], ...]")
    try:
        return [(_path(path), parse_version(before), parse_version(after)) for path, before, after in value]
    except (TypeError, ValueError) as error:
        raise WeightWireError(f"delta chain is malformed: {error}") from error
