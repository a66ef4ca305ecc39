"""How one kind of engine takes an update: a protocol, and a module for each kind. Plan and buckets know none of them.

`UpdateSession` decides who gets which message when; an updater knows the messages. All calls for one engine come from
that engine's own thread, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from miles.sync.config import SyncConfig
    from miles.sync.engine_link import EngineLink
    from miles.sync.entry import SourceSpec
    from miles.sync.membership import LiveEngine
    from miles.sync.plan import SyncPlan
    from miles.weight_wire.bucket import BucketHeader

EngineKind = Literal["embedded", "sglang"]
# Route and body fields by which a transport says where the weights are.
Message = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Update:
    """What is the same for every engine of one sync."""

    plan: SyncPlan
    version: int
    config: SyncConfig

    def bounded(self, nbytes: int = 0) -> float:
        """Seconds to wait for a call that moves `nbytes`."""
        return self.config.timeout_s + nbytes / (self.config.min_gb_per_s * 1e9)


class EngineUpdater(Protocol):
    """Each call raises `EngineSyncError` where the engine refused or did not answer."""

    def read(self, link: EngineLink, offered: Mapping[str, SourceSpec], *, timeout_s: float) -> LiveEngine:
        """What the engine says about itself. `offered`: the trainer's arrays, for engines that report no table."""
        ...

    def begin(self, link: EngineLink, engine: LiveEngine, update: Update) -> str:
        """Pause the engine and open an update; the token of its session."""
        ...

    def bucket(
        self, link: EngineLink, engine: LiveEngine, update: Update, token: str, header: BucketHeader, message: Message
    ) -> None:
        """One bucket, read and acknowledged with its digest."""
        ...

    def folder(
        self, link: EngineLink, engine: LiveEngine, update: Update, token: str, nbytes: int, message: Message
    ) -> None:
        """Load what was written to a folder."""
        ...

    def end(self, link: EngineLink, engine: LiveEngine, update: Update, token: str, buckets: int) -> None:
        """Close the update, read back what is served, resume."""
        ...

    def abort(self, link: EngineLink, update: Update, token: str, reason: str) -> None:
        """Give the update up; the engine serves nothing until a whole one."""
        ...

    def close(self) -> None: ...


def updater_for(kind: EngineKind) -> EngineUpdater:
    """The updater of engines of this kind."""
    if kind == "sglang":
        from miles.sync.updaters.sglang import SGLangUpdater

        return SGLangUpdater()
    from miles.sync.updaters.embedded import EmbeddedUpdater

    return EmbeddedUpdater()


__all__ = ["EngineKind", "EngineUpdater", "Message", "Update", "updater_for"]
