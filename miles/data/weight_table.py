"""What an engine says about its own parameters: the table that decides every format of a weight sync.

Plain records and their JSON form, shared by the engine (which reports) and `miles.sync` (which plans). Holds no
tensors and makes no decision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from miles.data.weight_bucket import DTYPES, SCALES, WeightWireError

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


def _entry_wire(entry: ParamEntry) -> Mapping[str, Any]:
    return {**asdict(entry), "shape": list(entry.shape), "fused_from": list(entry.fused_from)}
