"""What the megatron backend puts into checkpoint files, and how any mesh reads it back.

Each rank writes the parameters it owns (one owner per cut) as fp32 masters with their AdamW moments, under global
megatron-core names, plus its random state. Reading goes through the weight map's Hugging Face view, so a
checkpoint of one mesh loads into any other bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles.models.weightmap import BoundMap
from miles.train import checkpoint
from miles.train.checkpoint import FileRecord, Manifest
from miles.train.convert import MOMENTS, ModelShards
from miles.train.errors import CheckpointError
from miles.train.megatron import rng
from miles.train.megatron.mesh import Mesh
from miles.train.megatron.optimizer import MasterAdamW
from miles.train.megatron.trained import TrainedModel
from miles.train.megatron.weights import cut_of, is_replicated, owns, untied


def save_shards(
    directory: Path, step: int, models: Mapping[str, TrainedModel], mesh: Mesh
) -> tuple[Path, list[FileRecord]]:
    """`models`: by label (policy, critic). Every rank writes its file below `iter_<step>.tmp`; returns the folder and all files' records on every rank.

    A failure on any rank removes the folder and raises the same error on all ranks.
    """
    folder = directory / f"iter_{step}.tmp"
    _together(mesh, folder, lambda: checkpoint.begin(directory, step) if mesh.layout.rank == 0 else None)
    tensors, state = rng.capture()
    for label, trained in models.items():
        kinds = {"model": trained.optimizer.master_tensors(), **trained.optimizer.moments()}
        for kind, values in kinds.items():
            tensors |= {
                f"{label}.{kind}/{name}": value for name, value in values.items() if _owns(name, trained.bound, mesh)
            }
    metadata = {
        "rank": mesh.layout.rank,
        "tp_rank": dist.get_rank(mesh.tp),
        "expert_tp_rank": dist.get_rank(mesh.expert_tp),
        "rng": state,
    }
    name = f"rank_{mesh.layout.rank:05d}.safetensors"
    records = _together(mesh, folder, lambda: checkpoint.write_tensors(folder, name, tensors, metadata))
    return folder, records


def publish(folder: Path, manifest: Manifest, mesh: Mesh, *, keep: int) -> None:
    """Rank 0 makes the checkpoint visible; the others wait for it."""
    _together(mesh, folder, lambda: checkpoint.publish(folder, manifest, keep=keep) if mesh.layout.rank == 0 else None)


def _owns(name: str, bound: BoundMap, mesh: Mesh) -> bool:
    if untied(name, bound) != name:
        return False
    entry = bound.entry(name)
    rank, _ = cut_of(entry, mesh)
    return owns(entry, mesh) and (rank == 0 or not is_replicated(name, bound))


def _together(mesh: Mesh, folder: Path, work: Any) -> list[Any]:
    """Run `work` on every rank; results of all ranks, or one error on all ranks."""
    try:
        mine: tuple[Any, str | None] = (work(), None)
    except CheckpointError as error:
        mine = (None, str(error))
    except Exception as error:  # a rank must tell the others instead of leaving them in a collective
        mine = (None, f"rank {mesh.layout.rank}: {error}")
    outcomes: list[Any] = [mine]
    if mesh.layout.world_size > 1:
        outcomes = [None] * mesh.layout.world_size
        dist.all_gather_object(outcomes, mine)
    failures = [text for _, text in outcomes if text is not None]
    if failures:
        if mesh.layout.rank == 0:
            checkpoint.abandon(folder)
        raise CheckpointError("checkpoint was not saved: " + "; ".join(dict.fromkeys(failures)))
    return [value for value, _ in outcomes]


class ShardReader(ModelShards):
    """This rank's view of one model in a checkpoint's files."""

    def local(self, kind: str, name: str, shape: Sequence[int], mesh: Mesh) -> torch.Tensor:
        """This rank's part of one parameter's `kind` (model, exp_avg, exp_avg_sq)."""
        entry = self.bound.entry(untied(name, self.bound))
        parts = self.parts(kind, entry.mcore)
        rank, parallel = cut_of(entry, mesh)
        if len(parts) == parallel or is_replicated(entry.mcore, self.bound):
            mine = parts[0 if len(parts) == 1 else rank]
            if tuple(mine.shape) == tuple(shape):
                return mine
        full = dict(entry.to_hf(parts))

        def read(hf: str, axis: int | None, start: int, stop: int) -> torch.Tensor:
            return full[hf] if axis is None else full[hf].narrow(axis, start, stop - start)

        return entry.to_local(read, local=tuple(shape), rank=rank, parallel=parallel)

    def restore_rng(self, mesh: Mesh) -> None:
        """Restore this rank's random state when the checkpoint has one for each rank."""
        if len(self.manifest.files) != mesh.layout.world_size:
            return
        record = self.manifest.files[mesh.layout.rank]
        if "rng" not in record.metadata:
            return
        file = self.files[record.name]
        keys = [key for key in list(file.keys()) if key.startswith("rng/")]
        rng.restore({key: file.get_tensor(key) for key in keys}, record.metadata["rng"])


def load_optimizer(reader: ShardReader, optimizer: MasterAdamW, mesh: Mesh, steps: int) -> None:
    """Masters and moments of this rank from a checkpoint; `steps` optimizer steps were taken."""

    def gather(kind: str) -> Mapping[str, torch.Tensor]:
        return {item.name: reader.local(kind, item.name, item.weight.shape, mesh) for item in optimizer.masters}

    moments = {kind: gather(kind) for kind in MOMENTS}
    optimizer.restore(gather("model"), moments, steps)
