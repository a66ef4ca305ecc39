"""How weights travel: one protocol for buckets, one for folders, one module per data path; `choose` picks.

tensor and broadcast move buckets while the engines are paused; disk and disk_delta write a folder first and pause
the engines only to load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from miles.sync.errors import SyncOptionError

if TYPE_CHECKING:
    import torch

    from miles.sync.config import SyncConfig
    from miles.sync.membership import LiveEngine, LiveSet
    from miles.sync.plan import SyncPlan
    from miles.weight_wire.bucket import BucketHeader


class Transport(Protocol):
    name: str

    def connect(self, live: Sequence[LiveEngine], plan: SyncPlan) -> None:
        """Prepare for a sync with these engines; rebuilds groups when the membership changed."""
        ...

    def close(self) -> None: ...

    def capabilities(self) -> dict[str, Any]: ...


@runtime_checkable
class BucketTransport(Transport, Protocol):
    """Moves buckets of one layout to the engines of that layout."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer [nbytes]."""
        ...

    def release(self, buffer: torch.Tensor) -> None: ...

    def message(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> tuple[str, dict[str, Any]]:
        """Route and body fields that tell an engine where the bucket is."""
        ...

    def deliver(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> Future[None] | None:
        """Called once the messages are on their way; a future while this side still reads the buffer."""
        ...


@runtime_checkable
class FolderTransport(Transport, Protocol):
    """Writes a version where engines can read it."""

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], plan: SyncPlan, version: int) -> int:
        """Write the version; bytes written. Engines still serve the version before."""
        ...

    def message(self) -> tuple[str, dict[str, Any]]: ...

    def fall_back(self) -> bool:
        """After an engine could not use what was written: offer it whole. False if it was whole already."""
        ...

    def finished(self) -> None:
        """The version is in use: what no later sync can need is deleted."""
        ...


def choose(
    config: SyncConfig, engines: Sequence[LiveEngine], live: LiveSet, *, run_id: str, directory: Path | None
) -> Transport:
    """The transport for these engines. `SyncOptionError` names an option that cannot serve them."""
    from miles.weight_wire.bucket import host_identity

    here = host_identity()
    away = [engine.url for engine in engines if engine.host != here]
    name = config.transport
    if name == "auto":
        name = "broadcast" if away else "tensor"
    if name == "rdt":
        raise SyncOptionError(
            "sync.transport=rdt is not offered by this build (it needs NIXL between GPUs); use sync.transport=tensor "
            "for engines on this host, else broadcast"
        )
    lacking = [engine.url for engine in engines if name not in engine.transports]
    if lacking:
        raise SyncOptionError(f"sync.transport={name} is not offered by {', '.join(lacking)}; use one that all offer")
    if name == "tensor":
        from miles.sync.transports.tensor import TensorTransport

        if away:
            raise SyncOptionError(
                f"sync.transport=tensor hands over memory of this host, but {', '.join(away)} runs elsewhere; "
                "use sync.transport=broadcast or disk"
            )
        return TensorTransport()
    if name == "broadcast":
        from miles.sync.transports.broadcast import BroadcastTransport

        return BroadcastTransport(live, run_id=run_id, timeout_s=config.timeout_s)
    if directory is None:
        raise SyncOptionError(f"sync.transport={name} needs a folder that every engine can read: set sync.directory")
    if name == "disk":
        from miles.sync.transports.disk import DiskTransport

        return DiskTransport(directory, run_id=run_id, shard_bytes=config.bucket_bytes)
    from miles.sync.transports.delta import DeltaTransport

    chain = config.delta.max_chain
    return DeltaTransport(directory, run_id=run_id, shard_bytes=config.bucket_bytes, max_chain=chain)


__all__ = ["BucketTransport", "FolderTransport", "Transport", "choose"]
