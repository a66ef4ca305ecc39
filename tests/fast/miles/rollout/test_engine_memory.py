"""Memory that engines are asked to give away: every engine is asked, and one that keeps some is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles.rollout.engine import EngineClient
from miles.rollout.errors import EngineReplyError
from miles.rollout.pool import EnginePool
from miles_ci.declare import register_cpu_ci

register_cpu_ci(2, "stage-a-cpu")


def pool(monkeypatch: pytest.MonkeyPatch, *replies: Any) -> tuple[EnginePool, list[Any]]:
    """Engines that give these replies, and what they were asked."""
    asked: list[Any] = []

    def answering(url: str, reply: Any) -> Any:
        async def json(method: str, path: str, body: Any = None) -> Any:
            asked.append((url, path, body["tags"]))
            return reply

        return json

    engines = EnginePool([f"http://engine-{number}" for number in range(len(replies))])
    for client, reply in zip(engines.clients, replies, strict=True):
        monkeypatch.setattr(client, "_json", answering(client.url, reply))
    return engines, asked


def test_every_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, asked = pool(monkeypatch, {"held": {"weights": 0, "kv_cache": 0}}, {})
    asyncio.run(engines.release_memory(("kv_cache", "weights")))
    asyncio.run(engines.resume_memory(("weights",)))
    paths = ("/release_memory_occupation", ["kv_cache", "weights"]), ("/resume_memory_occupation", ["weights"])
    assert asked == [(client.url, *call) for call in paths for client in engines.clients]


def test_an_engine_that_keeps_what_it_should_release_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, _ = pool(monkeypatch, {"held": {"weights": 0, "kv_cache": 0}}, {"held": {"weights": 9, "kv_cache": 7}})
    asyncio.run(EngineClient.release_memory(engines.clients[0], ["weights"]))
    with pytest.raises(EngineReplyError, match=r"engine-1: .* still holds bytes of \{'weights': 9\}"):
        asyncio.run(engines.release_memory(["weights"]))
