"""Who holds the devices when: trainer and engines side by side, or in turns on the same ones (`placement.mode`).

Colocated, in each step: the engines generate; they release cache and weights; the trainer scores and trains; the engines
take room for weights, get them by the weight sync, and take room for the cache. A weight version exists in an engine only
between its sync and the next release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles.orchestrate.actor_group import ActorGroup

WEIGHTS, CACHE = "weights", "kv_cache"


class EngineMemory(Protocol):
    """All engines; `miles.rollout.pool.EnginePool`."""

    async def release_memory(self, tags: Sequence[str]) -> None: ...
    async def resume_memory(self, tags: Sequence[str]) -> None: ...


class DeviceSharing(Protocol):
    """`engines_keep_weights`: what an engine served before a step it still serves after it, and it takes requests
    meanwhile."""

    engines_keep_weights: bool

    async def to_trainer(self) -> None:
        """The engines have answered everything; scores and gradients come next."""

    async def to_weight_sync(self) -> None:
        """The trainer has finished; weights come next."""

    async def to_engines(self) -> None:
        """Every engine has the weights; requests come next."""


class Disaggregated:
    """Everybody has devices of their own."""

    engines_keep_weights = True

    async def to_trainer(self) -> None: ...
    async def to_weight_sync(self) -> None: ...
    async def to_engines(self) -> None: ...


class Colocated:
    """An engine's memory is free while the rank on its device trains."""

    engines_keep_weights = False

    def __init__(self, actors: ActorGroup, engines: EngineMemory) -> None:
        self._actors, self._engines = actors, engines

    async def to_trainer(self) -> None:
        await self._engines.release_memory((CACHE, WEIGHTS))
        await self._actors.on_all_workers("wake")

    async def to_weight_sync(self) -> None:
        # What the trainer's allocator keeps for later would be missing to the engine.
        await self._actors.on_all_workers("sleep")
        await self._engines.resume_memory((WEIGHTS,))

    async def to_engines(self) -> None:
        await self._engines.resume_memory((CACHE,))


def device_sharing(mode: str, actors: ActorGroup, engines: EngineMemory) -> DeviceSharing:
    """By `placement.mode`."""
    return Colocated(actors, engines) if mode == "colocated" else Disaggregated()
