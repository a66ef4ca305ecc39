"""How a bucket's bytes travel: one protocol, one module per data path. `choose` picks by configuration and place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from miles.sync.errors import SyncOptionError

if TYPE_CHECKING:
    import torch

    from miles.data.weight_bucket import BucketHeader
    from miles.sync.config import SyncConfig
    from miles.sync.membership import LiveEngine
    from miles.sync.plan import SyncPlan


class Transport(Protocol):
    """One data path. `allocate` gives bucket memory that engines can read; `send` moves one bucket to one engine."""

    name: str

    def connect(self, live: Sequence[LiveEngine], plan: SyncPlan) -> None:
        """Prepare for a sync with these engines; rebuilds groups when the membership changed."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer [nbytes], zeroed."""

    def release(self, buffer: torch.Tensor) -> None: ...

    def message(self, header: BucketHeader, buffer: torch.Tensor) -> tuple[str, dict[str, Any]]:
        """Route and body fields that tell an engine where the bucket is."""

    def close(self) -> None: ...

    def capabilities(self) -> dict[str, Any]: ...


def choose(config: SyncConfig, live: Sequence[LiveEngine]) -> Transport:
    """The transport for these engines. `SyncOptionError` names an option that cannot serve them."""
    from miles.data.weight_bucket import host_identity
    from miles.sync.transports.tensor import TensorTransport

    here = host_identity()
    away = [engine.url for engine in live if engine.host != here]
    if config.transport == "tensor" or (config.transport == "auto" and not away):
        if away:
            raise SyncOptionError(
                f"sync.transport=tensor hands over memory of this host, but {', '.join(away)} runs elsewhere; "
                "use sync.transport=broadcast or disk"
            )
        return TensorTransport()
    raise SyncOptionError(_why_not(config.transport))


def _why_not(name: str) -> str:
    return f"sync.transport={name} is not offered by this build; use sync.transport=tensor with engines on this host"
