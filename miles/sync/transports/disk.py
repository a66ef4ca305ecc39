"""Whole versions as verified folders that engines load themselves: `weights_<v>/` (see `miles.weight_wire.folder`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from miles.config.files import storage_error
from miles.sync.errors import SyncOptionError
from miles.sync.membership import LiveEngine
from miles.sync.plan import SyncPlan
from miles.weight_wire.folder import WrittenFolder, folder_name, write_folder

KEPT = 2


class DiskTransport:
    """Keeps the newest two versions; an engine that is still reading the one before is not disturbed."""

    name = "disk"

    def __init__(self, directory: Path, *, run_id: str, shard_bytes: int):
        self._directory = directory.absolute()
        self._run_id = run_id
        self._shard_bytes = shard_bytes
        self._written: list[WrittenFolder] = []

    def connect(self, live: Sequence[LiveEngine], plan: SyncPlan) -> None:
        refuse_quantised(self.name, plan)

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], plan: SyncPlan, version: int) -> int:
        self._written.append(write_version(self._directory, weights, self._run_id, version, self._shard_bytes))
        return self._written[-1].nbytes

    def message(self) -> tuple[str, dict[str, Any]]:
        return "/update_weights_from_disk", {"load_format": "safetensors", "model_path": str(self._written[-1].path)}

    def fall_back(self) -> bool:
        return False

    def finished(self) -> None:
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0).path, ignore_errors=True)

    def close(self) -> None:
        """Folders stay: engines that restart may be pointed at them."""

    def capabilities(self) -> dict[str, Any]:
        return {"name": self.name, "same_host": False, "directory": str(self._directory)}


def refuse_quantised(name: str, plan: SyncPlan) -> None:
    """Folders hold the trainer's own formats; an engine casts them but does not quantise."""
    quantised = sorted({e.dest for entries in plan.layouts.values() for e in entries if e.codec != "none"})
    if quantised:
        raise SyncOptionError(
            f"sync.transport={name} carries unquantised weights, but the engine stores {quantised[0]} quantised; use "
            "sync.transport=tensor or broadcast"
        )


def write_version(
    directory: Path, weights: Iterable[tuple[str, torch.Tensor]], run_id: str, version: int, shard_bytes: int
) -> WrittenFolder:
    """`write_folder` with disk faults as errors that name the folder and the fix."""
    try:
        return write_folder(directory, weights, run_id=run_id, version=version, shard_bytes=shard_bytes)
    except OSError as error:
        raise storage_error(directory / folder_name(version), error) from error
