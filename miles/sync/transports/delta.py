"""Versions as differences on disk: a full folder, then up to `max_chain` deltas, then a full folder again.

Keeps the last pushed version in CPU memory to compare with. An engine that follows loads one delta; one that joins
late loads the base and the chain; one whose base is not what it should be gets the version whole.
"""

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
from miles.sync.transports.disk import refuse_quantised, write_version
from miles.weight_wire.bucket import DTYPES
from miles.weight_wire.delta import WrittenDelta, write_delta
from miles.weight_wire.folder import WrittenFolder


class DeltaTransport:
    name = "disk_delta"

    def __init__(self, directory: Path, *, run_id: str, shard_bytes: int, max_chain: int):
        self._directory = directory.absolute()
        self._run_id = run_id
        self._shard_bytes = shard_bytes
        self._max_chain = max_chain
        self._plan_digest = ""
        self._last: dict[str, torch.Tensor] = {}
        self._version = 0
        self._base: tuple[WrittenFolder, int] | None = None
        self._chain: list[tuple[WrittenDelta, int, int]] = []
        self._old: list[Path] = []

    @property
    def chain_length(self) -> int:
        return len(self._chain)

    def connect(self, live: Sequence[LiveEngine], plan: SyncPlan) -> None:
        """Refuses what a delta of whole tensors cannot express; another plan starts a new chain."""
        refuse_quantised(self.name, plan)
        sharded = [engine.url for engine in live if engine.table.tp > 1]
        mixed = [name for name, entries in plan.by_source.items() if len({e.dtype for e in entries}) > 1]
        if sharded or mixed:
            what = (
                f"{', '.join(sharded)} uses tensor parallelism" if sharded else f"engines hold {mixed[0]} in two dtypes"
            )
            raise SyncOptionError(
                f"sync.transport=disk_delta compares whole tensors in the engines' one dtype, but {what}; "
                "use sync.transport=disk"
            )
        if plan.digest != self._plan_digest:
            self._plan_digest = plan.digest
            self._retire()

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], plan: SyncPlan, version: int) -> int:
        new = {
            name: tensor.detach().to("cpu", DTYPES[plan.by_source[name][0].dtype], copy=True).contiguous()
            for name, tensor in weights
        }
        if self._base is None or len(self._chain) >= self._max_chain:
            self._retire()
            self._last, self._version = new, version
            return self._write_base()
        try:
            delta = write_delta(
                self._directory, self._last, new, run_id=self._run_id, base=self._version, version=version
            )
        except OSError as error:
            raise storage_error(self._directory, error) from error
        self._chain.append((delta, self._version, version))
        self._last, self._version = new, version
        return delta.nbytes

    def message(self) -> tuple[str, dict[str, Any]]:
        assert self._base is not None
        folder, base = self._base
        fields: dict[str, Any] = {"load_format": "safetensors", "model_path": str(folder.path)}
        if self._chain:
            links = [[str(delta.path), str(before), str(after)] for delta, before, after in self._chain]
            fields |= {"load_format": "miles_delta", "base_version": str(base), "deltas": links}
        return "/update_weights_from_disk", fields

    def fall_back(self) -> bool:
        if not self._chain:
            return False
        self._retire()
        self._write_base()
        return True

    def finished(self) -> None:
        for path in self._old:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self._old = []

    def close(self) -> None:
        """Files stay: engines that restart may be pointed at them."""
        self._last = {}

    def capabilities(self) -> dict[str, Any]:
        return {"name": self.name, "same_host": False, "directory": str(self._directory), "chain": self.chain_length}

    def _write_base(self) -> int:
        folder = write_version(self._directory, self._last.items(), self._run_id, self._version, self._shard_bytes)
        self._base = (folder, self._version)
        return folder.nbytes

    def _retire(self) -> None:
        """Start a new chain; the old files go once no engine can need them."""
        if self._base is not None:
            self._old += [self._base[0].path, *(delta.path for delta, _, _ in self._chain)]
        self._base, self._chain = None, []
