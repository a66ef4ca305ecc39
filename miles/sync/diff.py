"""Compare what an engine holds with a checkpoint, destination by destination, by digest: `miles sync diff`.

The expected bytes of a destination are built as a sync would build them (fused, cut, cast, quantised); nothing is
sent to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from miles.config import ConfigError
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.sync.engine_link import EngineLink
from miles.sync.entry import PlanEntry, SourceSpec
from miles.sync.formats import encode_group
from miles.sync.membership import read_engine
from miles.sync.plan import build_plan
from miles.weight_wire.bucket import DTYPES, digest, dtype_name
from miles.weight_wire.table import EngineTable

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class EngineDiff:
    """`differing`: destinations whose bytes are not the checkpoint's; `equal`: how many are."""

    version: str
    state: str
    equal: int
    differing: tuple[str, ...]


def diff_engine(
    url: str, checkpoint: Path, *, token: str | None = None, nvfp4: NVFP4QDQConfig | None = None
) -> EngineDiff:
    """Read-only. `EngineSyncError` if the engine is away, `PlanError` if the names do not fit, `ConfigError` for the folder."""
    specs, read = _open(checkpoint)
    link = EngineLink(url, token=token)
    try:
        engine = read_engine(link, timeout_s=TIMEOUT_S)
        reply = link.get("/parameter_digests", timeout_s=TIMEOUT_S)
    finally:
        link.close()
    plan = build_plan(specs, [engine.table], run_id="diff")
    groups: dict[str, list[PlanEntry]] = {}
    for entry in plan.layouts[engine.table.layout_key]:
        groups.setdefault(entry.atomic_group, []).append(entry)
    differing, equal = [], 0
    for entries in groups.values():
        for name, expected in _expected(entries, engine.table, read, nvfp4 or NVFP4QDQConfig()).items():
            if f"{digest(expected):#x}" == reply["digests"].get(name):
                equal += 1
            else:
                differing.append(name)
    weights = reply["weights"]
    return EngineDiff(weights["weight_version"], weights["state"], equal, tuple(sorted(differing)))


def _expected(
    entries: list[PlanEntry], table: EngineTable, read: Callable[[str], torch.Tensor], nvfp4: NVFP4QDQConfig
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for entry, value in encode_group([(entry, read(entry.hf_name)) for entry in entries], nvfp4):
        held = table.by_name[entry.dest]
        whole = found.setdefault(entry.dest, torch.zeros(held.shape, dtype=DTYPES[held.dtype]))
        for dim, (start, stop) in enumerate(entry.slot or ()):
            whole = whole.narrow(dim, start, stop - start)
        whole.copy_(value.reshape(whole.shape))
    return found


def _open(folder: Path) -> tuple[Mapping[str, SourceSpec], Callable[[str], torch.Tensor]]:
    """Names, shapes and dtypes of all safetensors files of a folder, and a reader."""
    where = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            where.update(dict.fromkeys(handle.keys(), handle))
        specs = {}
        for name, handle in where.items():
            tensor = handle.get_tensor(name)
            specs[name] = SourceSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: cannot be read as a checkpoint: {error}") from error
    if not specs:
        raise ConfigError(f"{folder}: holds no safetensors files; name a Hugging Face model folder")
    return specs, lambda name: where[name].get_tensor(name)
