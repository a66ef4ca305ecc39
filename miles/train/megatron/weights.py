"""Weights in and out of the built model, and out of the mesh: Hugging Face (HF) tensors <-> local parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from miles.models.hf_files import HFCheckpoint
from miles.models.weightmap import BoundMap, Entry
from miles.train.megatron.build import ModelChunk
from miles.train.megatron.mesh import Mesh

Named = dict[str, torch.Tensor]


def local_parameters(chunks: Sequence[ModelChunk]) -> Named:
    """Global megatron-core name -> parameter of this rank; the second copy of a tied embedding is left out."""
    named: Named = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            named[name] = parameter
        for name, buffer in chunk.model.named_buffers():
            owner = chunk.model.get_submodule(name.rpartition(".")[0])
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                named[name] = buffer
    return named


def load_hf(directory: Path, chunks: Sequence[ModelChunk], bound: BoundMap, mesh: Mesh) -> None:
    """Copy a checkpoint into the model; every shape is checked before the first byte is copied."""
    checkpoint = HFCheckpoint(directory)
    bound.check_hf_coverage(checkpoint.names(), where=str(directory))
    named = local_parameters(chunks)
    targets = [(entry, tensor) for entry, tensor in with_entries(named, bound)]
    for entry, tensor in targets:
        _, parallel = cut_of(entry, mesh)
        for name, shape in zip(entry.hf, entry.hf_shapes(tensor.shape, parallel), strict=True):
            checkpoint.check(name, shape)
    with torch.no_grad():
        for entry, tensor in targets:
            tensor.copy_(read_local(entry, tensor.shape, mesh, checkpoint.read))
    checkpoint.close()


def is_replicated(name: str, bound: BoundMap) -> bool:
    """Whether all tensor-parallel ranks hold the same values of this parameter."""
    return all(axis is None for axis in bound.entry(untied(name, bound)).rule.axes)


def with_entries(named: Mapping[str, torch.Tensor], bound: BoundMap) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Each local parameter with its map entry. The output copy of a tied embedding uses the embedding's entry."""
    names = {name: untied(name, bound) for name in named}
    bound.check_mcore_coverage(names.values())
    for name, tensor in named.items():
        yield bound.entry(names[name]), tensor


def untied(name: str, bound: BoundMap) -> str:
    """With tied embeddings the last pipeline stage holds a second copy under the output layer's name."""
    return "embedding.word_embeddings.weight" if bound.shape.tied and name == "output_layer.weight" else name


def cut_of(entry: Entry, mesh: Mesh) -> tuple[int, int]:
    """(rank, size) of the tensor-parallel group that cuts this entry."""
    group = mesh.expert_tp if entry.rule.per_expert else mesh.tp
    return dist.get_rank(group), dist.get_world_size(group)


def read_local(
    entry: Entry,
    shape: Sequence[int],
    mesh: Mesh,
    read: Callable[[str, int | None, int, int], torch.Tensor],
) -> torch.Tensor:
    """This rank's part of one entry, from any source of HF tensors."""
    rank, parallel = cut_of(entry, mesh)
    return entry.to_local(read, local=tuple(shape), rank=rank, parallel=parallel)


def gather_hf(named: Mapping[str, torch.Tensor], bound: BoundMap, mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Full HF tensors on global rank 0, one entry at a time, in the map's order; other ranks take part and yield nothing.

    Every rank must call this and exhaust it. With one process the tensors may alias the parameters.
    """
    if not mesh.holds_saved_copy:
        return
    if mesh.layout.world_size == 1:
        for entry in bound.entries.values():
            yield from entry.to_hf([named[entry.mcore].detach()])
        return
    for entry in bound.entries.values():
        local = named.get(entry.mcore)
        rank, parallel = cut_of(entry, mesh)
        group = mesh.expert_tp if entry.rule.per_expert else mesh.tp
        full: list[tuple[str, torch.Tensor]] | None = None
        if local is not None:
            pieces = [torch.empty_like(local) for _ in range(parallel)] if rank == 0 else None
            if parallel == 1:
                pieces = [local.detach()]
            else:
                dist.gather(local.detach().contiguous(), pieces, group=group, group_dst=0)
            full = entry.to_hf(pieces) if rank == 0 and pieces is not None else None
        if full is not None and mesh.layout.rank == 0:
            yield from full
