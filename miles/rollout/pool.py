"""`EnginePool`: several engines behind the interface of one client, without a router in between.

Each `generate_many` (a group of samples) goes whole to the engine with the fewest sequences in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles.rollout.engine import EngineClient, EngineInfo
from miles.rollout.errors import EngineError
from miles.rollout.messages import GenerateRequest, GenerateResult


class EnginePool:
    """Same methods as `EngineClient` where a rollout needs them. Use as `async with`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        vocab_size: int | None = None,
        timeout_s: float = 600.0,
        version_wait_s: float = 3600.0,
    ) -> None:
        if not urls:
            raise EngineError("no engine: EnginePool needs at least one url")
        self.clients = [
            EngineClient(url, token=token, vocab_size=vocab_size, timeout_s=timeout_s, version_wait_s=version_wait_s)
            for url in urls
        ]
        self.url = ", ".join(client.url for client in self.clients)
        self._inflight = [0] * len(self.clients)
        self._info: EngineInfo | None = None

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))

    async def info(self) -> EngineInfo:
        """Of the engine with the smallest context; all must have the same vocabulary."""
        if self._info is not None:
            return self._info
        infos = await asyncio.gather(*(client.info() for client in self.clients))
        sizes = {info.vocab_size for info in infos}
        if len(sizes) > 1:
            raise EngineError(f"engines {self.url} differ in vocabulary size: {sorted(map(str, sizes))}")
        self._info = min(infos, key=lambda info: info.context_length or 1 << 62)
        return self._info

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        index = min(range(len(self.clients)), key=lambda i: (self._inflight[i], i))
        self._inflight[index] += len(requests)
        try:
            return await self.clients[index].generate_many(requests)
        finally:
            self._inflight[index] -= len(requests)

    async def pause(self, mode: str = "retract") -> None:
        await asyncio.gather(*(client.pause(mode) for client in self.clients))

    async def resume(self) -> None:
        await asyncio.gather(*(client.resume() for client in self.clients))

    async def release_memory(self, tags: Sequence[str]) -> None:
        await asyncio.gather(*(client.release_memory(tags) for client in self.clients))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await asyncio.gather(*(client.resume_memory(tags) for client in self.clients))

    async def abort(self, rid: str | None = None, *, prefix: bool = False) -> None:
        await asyncio.gather(*(client.abort(rid, prefix=prefix) for client in self.clients))
