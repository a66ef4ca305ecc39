"""Where an engine's disk updates read from: a full weight folder, or a base and the chain of deltas that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from miles.rollout.engines.embedded.weight_messages import DiskMessage
from miles.weight_wire.bucket import WeightWireError
from miles.weight_wire.delta import WeightDelta
from miles.weight_wire.folder import WeightFolder


@dataclass(frozen=True)
class NamedWeights:
    """Whole tensors by Hugging Face name. `read(name, current)` may start from what the engine holds."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, torch.Tensor], torch.Tensor]


def open_source(message: DiskMessage, run_id: str, holds: tuple[str | None, int]) -> NamedWeights:
    """Check and open what an update message names. `holds`: (run id, version) that the engine last finished.

    Without deltas: the folder `message.path`. With: if the engine holds a version that the chain passes through, only
    the later deltas; else the base folder and all of them. `WeightWireError` when a part is missing, damaged or of
    another run.
    """
    version = message.session.version
    if message.base is None:
        return _whole(WeightFolder(message.path, run_id=run_id, version=version))
    reached = [message.base, *(after for _, _, after in message.deltas)]
    if [before for _, before, _ in message.deltas] != reached[:-1] or reached[-1] != version:
        raise WeightWireError(f"delta chain {reached} does not lead to version {version} link by link")
    held = holds[1] if holds[0] == run_id and holds[1] in reached[:-1] else None
    source = None if held is not None else _whole(WeightFolder(message.path, run_id=run_id, version=message.base))
    links = [
        WeightDelta(file, run_id=run_id, base=before, version=after)
        for file, before, after in message.deltas
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
