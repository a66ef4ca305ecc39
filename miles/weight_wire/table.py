"""What an engine says about its own parameters: the table that decides every format of a weight sync.

Plain records and their JSON form, shared by the engine (which reports) and `miles.sync` (which plans). Holds no
tensors and makes no decision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from miles.weight_wire.bucket import DTYPES, SCALES, Slot, WeightWireError

POST_PROCESS = ("none", "idempotent", "once")


def canonical_digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`: keys sorted, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """One destination inside an engine rank.

    `shape` is this rank's own shape, `dtype` a wire name, `scale` one of SCALES with its array in `scale_name`.
    `fused_from` lists the Hugging Face names that fill it, expert-major (expert, then shard), and is empty when
    the destination has the Hugging Face name itself. `shard_dim` is the dimension of the *source* that tensor
    parallelism splits (None: replicated). `alias_of` names the destination whose storage this one shares.
    `recomputed` marks what the engine derives itself (rotary caches) and a sync never fills.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    module: str = "target"
    scale: str = "none"
    scale_name: str | None = None
    fused_from: tuple[str, ...] = ()
    num_shards: int = 1
    num_local_experts: int = 0
    alias_of: str | None = None
    post_process: str = "none"
    shard_dim: int | None = None
    recomputed: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.scale not in SCALES or self.post_process not in POST_PROCESS:
            raise WeightWireError(
                f"parameter {self.name}: unknown dtype {self.dtype!r}, scale {self.scale!r} "
                f"or post_process {self.post_process!r}"
            )
        if self.fused_from and len(self.fused_from) != self.pieces:
            raise WeightWireError(
                f"parameter {self.name}: {len(self.fused_from)} fused names, but num_shards {self.num_shards} x "
                f"num_local_experts {self.num_local_experts} wait for {self.pieces}"
            )

    @property
    def pieces(self) -> int:
        """How many pieces must arrive before the destination is complete."""
        return self.num_shards * max(self.num_local_experts, 1)

    @property
    def filled_by_sync(self) -> bool:
        return self.alias_of is None and not self.recomputed


@dataclass(frozen=True)
class EngineTable:
    """All destinations of one engine rank, with the layout they belong to. `source`: reported or derived."""

    entries: tuple[ParamEntry, ...]
    tp: int = 1
    ep: int = 1
    pp: int = 1
    engine_rank: int = 0
    build: str = "embedded"
    source: str = "reported"

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise WeightWireError(f"engine table lists parameter {entry.name} twice")
            seen.add(entry.name)
        for entry in self.entries:
            if entry.alias_of is not None and entry.alias_of not in seen:
                raise WeightWireError(f"parameter {entry.name} is an alias of unknown {entry.alias_of}")

    @cached_property
    def by_name(self) -> dict[str, ParamEntry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def table_digest(self) -> str:
        """Identifies names, shapes, formats and layout; equal digests mean one plan serves both engines."""
        return canonical_digest(self._body())

    @property
    def layout_key(self) -> str:
        """Short form of the digest: engines with the same key receive the same buckets."""
        return f"tp{self.tp}r{self.engine_rank}-{self.table_digest[:16]}"

    def to_wire(self) -> dict[str, Any]:
        return {**self._body(), "source": self.source, "table_digest": self.table_digest}

    @classmethod
    def from_wire(cls, wire: Any) -> EngineTable:
        """Strict reader; a digest that does not match the content is an error."""
        try:
            entries = tuple(
                ParamEntry(**{**e, "shape": tuple(e["shape"]), "fused_from": tuple(e["fused_from"])})
                for e in wire["entries"]
            )
            fields = {key: wire[key] for key in ("tp", "ep", "pp", "engine_rank", "build", "source")}
            table = cls(entries=entries, **fields)
            announced = wire["table_digest"]
        except (KeyError, TypeError) as error:
            raise WeightWireError(f"engine table is malformed: {error!r}") from error
        if table.table_digest != announced:
            raise WeightWireError(f"engine table digest {announced!r:.20} does not match its content")
        return table

    def _body(self) -> dict[str, Any]:
        return {
            "entries": [_entry_wire(entry) for entry in self.entries],
            "tp": self.tp,
            "ep": self.ep,
            "pp": self.pp,
            "engine_rank": self.engine_rank,
            "build": self.build,
        }


@dataclass(frozen=True, slots=True)
class Part:
    """How one source fills (part of) a destination: its `slice` goes to `slot`, as `shape`. None: all of it."""

    hf_name: str
    slice: Slot | None
    slot: Slot | None
    shape: tuple[int, ...]


def parts_of(entry: ParamEntry, shapes: Mapping[str, tuple[int, ...]], table: EngineTable) -> list[Part]:
    """The parts that fill a destination exactly, in order; `shapes` are the full shapes of its sources.

    Fused sources are stacked along dimension 0 (per expert for packed experts); tensor parallelism first cuts each
    source along `shard_dim`. `WeightWireError` when they do not fill it or cannot be cut.
    """
    parts: list[Part] = []
    names: Sequence[str] = entry.fused_from or (entry.name,)
    packed = 1 if entry.num_local_experts else 0
    row = 0
    for index, name in enumerate(names):
        cut, shape = _cut(entry, name, shapes[name], table)
        slot: Slot | None = None
        if len(names) > 1 or packed:
            expert, shard = divmod(index, entry.num_shards)
            start = 0 if shard == 0 else row
            row = start + shape[0]
            slot = ((expert, expert + 1), (start, row)) if packed else ((start, row),)
            complete = shard < entry.num_shards - 1 or row == entry.shape[packed]
            fits = shape[1:] == entry.shape[packed + 1 :] and row <= entry.shape[packed] and complete
        else:
            fits = shape == entry.shape
        if not fits:
            raise WeightWireError(
                f"{name} {list(shapes[name])} does not fit {entry.name} {list(entry.shape)} "
                f"at tp {table.tp} rank {table.engine_rank}"
            )
        parts.append(Part(name, cut, slot, shape))
    return parts


def _cut(
    entry: ParamEntry, name: str, shape: tuple[int, ...], table: EngineTable
) -> tuple[Slot | None, tuple[int, ...]]:
    """This rank's slice of a source, and the slice's shape."""
    dim = entry.shard_dim
    if dim is None or table.tp == 1:
        return None, shape
    if dim >= len(shape) or shape[dim] % table.tp:
        raise WeightWireError(f"{name} {list(shape)}: dimension {dim} cannot be split over tp {table.tp}")
    size, rank = shape[dim] // table.tp, table.engine_rank % table.tp
    cut = (*((0, n) for n in shape[:dim]), (rank * size, (rank + 1) * size))
    return cut, (*shape[:dim], size, *shape[dim + 1 :])


def _entry_wire(entry: ParamEntry) -> Mapping[str, Any]:
    return {**asdict(entry), "shape": list(entry.shape), "fused_from": list(entry.fused_from)}
