"""Weights in and out of the built model, and out of the mesh: Hugging Face (HF) tensors <-> local parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from miles.models.family import FamilyConfig
from miles.models.hf_files import HFCheckpoint
from miles.models.weightmap import BoundMap, Entry, MapShape, Skip, WeightMap, direct
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


VALUE_HEAD = "value_head.weight"


def critic_map(policy: WeightMap) -> WeightMap:
    """The policy's map with a value head in place of the vocabulary's output layer."""
    rules = tuple(rule for rule in policy.rules if rule.mcore != "output_layer.weight")
    skip = Skip("lm_head.weight", "a critic has a value head instead")
    return replace(policy, rules=(*rules, direct(VALUE_HEAD, "output_layer.weight")), skips=(*policy.skips, skip))


def critic_shape(model: FamilyConfig) -> MapShape:
    """A critic's value head is never tied to the embedding."""
    return replace(model.map_shape, tied=False)


def load_hf(directory: Path, chunks: Sequence[ModelChunk], bound: BoundMap, mesh: Mesh) -> None:
    """Copy a checkpoint into the model; every shape is checked before the first byte is copied.

    A value head that the folder lacks keeps its zeros.
    """
    checkpoint = HFCheckpoint(directory)
    fresh = {VALUE_HEAD} & set(bound.expected_hf) - set(checkpoint.names())
    bound.check_hf_coverage({*checkpoint.names(), *fresh}, where=str(directory))
    named = local_parameters(chunks)
    targets = [(entry, tensor) for entry, tensor in with_entries(named, bound) if not fresh & set(entry.hf)]
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


def cut_group(entry: Entry, mesh: Mesh) -> dist.ProcessGroup:
    """The tensor-parallel group that cuts this entry."""
    return mesh.expert_tp if entry.rule.per_expert else mesh.tp


def cut_of(entry: Entry, mesh: Mesh) -> tuple[int, int]:
    """(rank, size) of this rank in `cut_group`."""
    group = cut_group(entry, mesh)
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


@dataclass(frozen=True)
class Owner:
    """The rank that assembles a parameter, and its local shape there."""

    rank: int
    shape: tuple[int, ...]


def owns(entry: Entry, mesh: Mesh) -> bool:
    """One rank of those with equal copies of a local parameter stands for them."""
    copies = mesh.expert_dp if entry.rule.per_expert else mesh.dp_cp
    return dist.get_rank(copies) == 0


class FullTensors:
    """Assembles full HF tensors on global rank 0 from the parameters of all ranks, one entry at a time."""

    def __init__(self, bound: BoundMap, mesh: Mesh) -> None:
        self.bound = bound
        self.mesh = mesh
        self._owners: dict[str, Owner] | None = None

    def gather(self, named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and tensors in the map's order; ranks other than 0 take part and yield nothing.

        Every rank must exhaust the iterator. The tensors may alias the parameters.
        """
        if self.mesh.layout.world_size == 1:
            for entry in self.bound.entries.values():
                yield from entry.to_hf([named[entry.mcore].detach()])
            return
        owners = self._find_owners(named)
        # One precision per set of tensors: parameters, or fp32 moments.
        dtype = next(iter(named.values())).dtype
        for entry in self.bound.entries.values():
            full = self._assemble(entry, named.get(entry.mcore))
            owner = owners[entry.mcore]
            if owner.rank != 0:
                full = self._hand_over(entry, owner, full, dtype)
            if full is not None and self.mesh.layout.rank == 0:
                yield from full

    def _assemble(self, entry: Entry, local: torch.Tensor | None) -> list[tuple[str, torch.Tensor]] | None:
        """Full tensors on the entry's owner, None elsewhere."""
        if local is None or not owns(entry, self.mesh):
            return None
        rank, parallel = cut_of(entry, self.mesh)
        local = local.detach().contiguous()
        if parallel == 1 or all(axis is None for axis in entry.rule.axes):
            return entry.to_hf([local] * parallel) if rank == 0 else None
        pieces = [torch.empty_like(local) for _ in range(parallel)] if rank == 0 else None
        dist.gather(local, pieces, group=cut_group(entry, self.mesh), group_dst=0)
        return entry.to_hf(pieces) if pieces is not None else None

    def _hand_over(
        self, entry: Entry, owner: Owner, full: list[tuple[str, torch.Tensor]] | None, dtype: torch.dtype
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Send from the owner to global rank 0."""
        if self.mesh.layout.rank == owner.rank and full is not None:
            for _, tensor in full:
                dist.send(tensor, dst=0)
            return None
        if self.mesh.layout.rank != 0:
            return None
        _, parallel = cut_of(entry, self.mesh)
        received = []
        for name, shape in zip(entry.hf, entry.hf_shapes(owner.shape, parallel), strict=True):
            tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            dist.recv(tensor, src=owner.rank)
            received.append((name, tensor))
        return received

    def _find_owners(self, named: Mapping[str, torch.Tensor]) -> dict[str, Owner]:
        if self._owners is None:
            mine = {}
            for name, tensor in named.items():
                if untied(name, self.bound) != name:
                    continue
                entry = self.bound.entry(name)
                if owns(entry, self.mesh) and cut_of(entry, self.mesh)[0] == 0:
                    mine[name] = Owner(self.mesh.layout.rank, tuple(tensor.shape))
            everyone: list[dict[str, Owner]] = [{} for _ in range(self.mesh.layout.world_size)]
            dist.all_gather_object(everyone, mine)
            self._owners = {name: owner for part in everyone for name, owner in part.items()}
        return self._owners
