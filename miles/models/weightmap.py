"""One declarative map between Hugging Face (HF) tensor names and megatron-core parameters; both directions derive from it.

A rule names one megatron-core parameter, the HF tensors behind it, the axis along which tensor parallelism
cuts each of them, and how the cut pieces form the local parameter. Importing cuts and joins, exporting splits
and concatenates, so `to_hf(to_mcore(x)) == x` bit for bit at every mesh coordinate, for weights and for
optimizer moments alike. Templates hold `{layer}` (global layer number) and `{expert}` (global expert number).

Leaves out dtype changes and quantisation: tensors keep the dtype they came with.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from miles.models.errors import WeightMapError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MapShape:
    """What a map must know of a model to enumerate its tensors."""

    num_layers: int
    heads: int
    groups: int
    head_dim: int
    vocab_size: int
    tied: bool
    num_experts: int = 0


@dataclass(frozen=True)
class Rule:
    """`mcore` and `hf` are templates; `axes[i]` is the tensor-parallel axis of `hf[i]` (None: replicated).

    `pad_vocab`: the rows are a vocabulary, padded with zero rows until tp divides them.
    `when` selects the models that have this parameter.
    """

    mcore: str
    hf: tuple[str, ...]
    axes: tuple[int | None, ...]
    pad_vocab: bool = False
    when: Callable[[MapShape], bool] | None = None

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.mcore

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.mcore

    def join(self, parts: Sequence[torch.Tensor], shape: MapShape) -> torch.Tensor:
        """Local parameter from the local cuts of the HF tensors."""
        return parts[0]

    def split(self, local: torch.Tensor, shape: MapShape) -> list[torch.Tensor]:
        """Inverse of `join`."""
        return [local]


def direct(
    hf: str,
    mcore: str,
    *,
    axis: int | None = None,
    pad_vocab: bool = False,
    when: Callable[[MapShape], bool] | None = None,
) -> Rule:
    """One HF tensor is the parameter."""
    return Rule(mcore=mcore, hf=(hf,), axes=(axis,), pad_vocab=pad_vocab, when=when)


@dataclass(frozen=True)
class QKV(Rule):
    """q, k, v projections <-> rows grouped per key/value group: [q heads of the group, k, v]."""

    axes: tuple[int | None, ...] = (0, 0, 0)

    def join(self, parts: Sequence[torch.Tensor], shape: MapShape) -> torch.Tensor:
        import torch

        groups = parts[1].shape[0] // shape.head_dim
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)

    def split(self, local: torch.Tensor, shape: MapShape) -> list[torch.Tensor]:
        query_rows = shape.heads // shape.groups * shape.head_dim
        rows = query_rows + 2 * shape.head_dim
        grouped = local.reshape(local.shape[0] // rows, rows, *local.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split([query_rows, shape.head_dim, shape.head_dim], dim=1)]


@dataclass(frozen=True)
class GateUp(Rule):
    """gate and up projections <-> linear_fc1 rows [cut of gate, cut of up]."""

    axes: tuple[int | None, ...] = (0, 0)

    def join(self, parts: Sequence[torch.Tensor], shape: MapShape) -> torch.Tensor:
        import torch

        return torch.cat(list(parts), dim=0)

    def split(self, local: torch.Tensor, shape: MapShape) -> list[torch.Tensor]:
        return list(local.chunk(2, dim=0))


@dataclass(frozen=True)
class Tied:
    """`hf` repeats `source` when the config ties them: absent or equal on disk, never exported."""

    hf: str
    source: str


@dataclass(frozen=True)
class Skip:
    """HF names (glob) that carry nothing to train, and why."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class AtomicGroup:
    """HF name suffixes below one prefix that must travel in one sync bucket."""

    key: str
    suffixes: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One rule bound to a layer and an expert. `mcore` is the global name; `hf` the HF names in rule order."""

    rule: Rule
    mcore: str
    hf: tuple[str, ...]
    shape: MapShape

    def hf_shapes(self, local: Sequence[int], parallel: int) -> list[tuple[int, ...]]:
        """Full HF shapes from the local parameter's shape and the number of tensor-parallel cuts."""
        import torch

        parts = self.rule.split(torch.empty(tuple(local), device="meta"), self.shape)
        shapes = []
        for part, axis in zip(parts, self.rule.axes, strict=True):
            full = list(part.shape)
            if axis is not None:
                full[axis] *= parallel
            if self.rule.pad_vocab:
                full[0] = self.shape.vocab_size
            shapes.append(tuple(full))
        return shapes

    def to_local(
        self,
        read: Callable[[str, int | None, int, int], torch.Tensor],
        *,
        local: Sequence[int],
        rank: int,
        parallel: int,
    ) -> torch.Tensor:
        """Local parameter of tensor-parallel `rank`. `read(name, axis, start, stop)` returns a cut of an HF tensor."""
        parts = []
        shapes = self.hf_shapes(local, parallel)
        for name, axis, full in zip(self.hf, self.rule.axes, shapes, strict=True):
            if axis is None:
                parts.append(read(name, None, 0, 0))
                continue
            rows = local[0] if self.rule.pad_vocab else full[axis] // parallel
            start, stop = rank * rows, (rank + 1) * rows
            if self.rule.pad_vocab:
                parts.append(_padded(read(name, axis, min(start, full[0]), min(stop, full[0])), rows))
            else:
                parts.append(read(name, axis, start, stop))
        return self.rule.join(parts, self.shape)

    def to_hf(self, locals_: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Full HF tensors from the local parameters of all tensor-parallel ranks, in rank order."""
        import torch

        split = [self.rule.split(local, self.shape) for local in locals_]
        result = []
        for index, (name, axis) in enumerate(zip(self.hf, self.rule.axes, strict=True)):
            parts = [pieces[index] for pieces in split]
            full = parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, dim=axis)
            if self.rule.pad_vocab:
                full = full[: self.shape.vocab_size]
            result.append((name, full.contiguous()))
        return result


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    import torch

    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])], dim=0)


@dataclass(frozen=True)
class WeightMap:
    """All rules of a family. `bind` makes the map of one model."""

    rules: tuple[Rule, ...]
    tied: tuple[Tied, ...] = ()
    skips: tuple[Skip, ...] = ()
    atomic: tuple[AtomicGroup, ...] = ()

    def bind(self, shape: MapShape) -> BoundMap:
        return BoundMap(self, shape)


class BoundMap:
    """A family's map for one model: every entry, by megatron-core name and by HF name."""

    def __init__(self, weight_map: WeightMap, shape: MapShape) -> None:
        self.map = weight_map
        self.shape = shape
        self.entries = {entry.mcore: entry for entry in self._enumerate()}

    @cached_property
    def expected_hf(self) -> dict[str, Entry]:
        """HF names that a checkpoint must hold -> the entry that consumes each."""
        return {name: entry for entry in self.entries.values() for name in entry.hf}

    def entry(self, mcore: str) -> Entry:
        """The entry of one global megatron-core name; an unknown name is an error."""
        if mcore not in self.entries:
            raise WeightMapError(f"no rule of the weight map produces the megatron-core parameter {mcore}")
        return self.entries[mcore]

    def check_mcore_coverage(self, names: Iterable[str]) -> None:
        """Every megatron-core parameter and persistent buffer must have a rule; all names without one are listed."""
        unmapped = sorted(set(names) - set(self.entries))
        if unmapped:
            raise WeightMapError("no rule of the weight map produces: " + ", ".join(unmapped))

    def check_hf_coverage(self, names: Iterable[str], *, where: str) -> None:
        """Every HF name is consumed, tied or skipped and none is missing; all offending names are listed."""
        present = set(names)
        tied = {rule.hf for rule in self.map.tied} if self.shape.tied else set()
        unmapped = sorted(
            name
            for name in present - set(self.expected_hf) - tied
            if not any(fnmatch.fnmatchcase(name, skip.pattern) for skip in self.map.skips)
        )
        missing = sorted(set(self.expected_hf) - present)
        problems = []
        if unmapped:
            problems.append("tensors that the weight map does not know: " + ", ".join(unmapped))
        if missing:
            problems.append("tensors that are missing: " + ", ".join(missing))
        if problems:
            raise WeightMapError(f"{where}: " + "; ".join(problems))

    def atomic_group(self, hf_name: str) -> str | None:
        """Key of the group of tensors that `hf_name` must travel with, or None."""
        for group in self.map.atomic:
            for suffix in group.suffixes:
                if hf_name.endswith(suffix):
                    return hf_name.removesuffix(suffix) + group.key
        return None

    def _enumerate(self) -> Iterator[Entry]:
        for rule in self.map.rules:
            if rule.when is not None and not rule.when(self.shape):
                continue
            layers: Iterable[int | None] = range(self.shape.num_layers) if rule.per_layer else (None,)
            experts: list[int | None] = list(range(self.shape.num_experts)) if rule.per_expert else [None]
            for layer in layers:
                for expert in experts:
                    fill = {"layer": layer, "expert": expert}
                    yield Entry(
                        rule=rule,
                        mcore=rule.mcore.format(**fill),
                        hf=tuple(name.format(**fill) for name in rule.hf),
                        shape=self.shape,
                    )


_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def global_name(local: str, *, layer_offset: int, expert_offset: int) -> str:
    """Name with global layer and expert numbers from a module's local name."""
    shifted = _LAYER.sub(lambda match: str(int(match.group()) + layer_offset), local, count=1)
    return _EXPERT.sub(lambda match: str(int(match.group()) + expert_offset), shifted, count=1)
