"""Engines for weight-sync tests: real HTTP servers around the embedded engine's own update routes."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from miles.rollout import access
from miles.rollout.engines.embedded.connections import watched_protocol
from miles.rollout.engines.embedded.weight_routes import register_routes
from miles.rollout.engines.embedded.weight_service import NOBODY, WeightService
from miles.rollout.engines.embedded.weight_state import BeginUpdate, UpdateSession, WeightState


class ParameterHost:
    """A model of bare parameters with the engine's weight duties; generation returns what the weights say.

    `lying_flush` keeps a cached prefix through a flush, to prove that the verification notices.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], aliases: dict[str, str] | None = None):
        self._parameters, self._aliases = parameters, aliases or {}
        self.state = WeightState()
        self.owners: set[str] = set()
        self.cached = 0
        self.lying_flush = False
        self.pauses: list[str] = []

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._parameters

    def aliases(self) -> dict[str, str]:
        return self._aliases

    @property
    def paused(self) -> bool:
        return bool(self.owners)

    @property
    def weight_version(self) -> int:
        return self.state.get().version

    def pause(self, mode: str, owner: str) -> Future[None]:
        self.owners.add(owner)
        self.pauses.append(mode)
        return _done()

    def resume(self, owner: str) -> Future[None]:
        self.owners.discard(owner)
        return _done()

    def begin_update(self, begin: BeginUpdate, now: float, client: object = None) -> UpdateSession:
        return self.state.begin(begin, now, client=client)

    def flush_caches(self) -> None:
        if not self.lying_flush:
            self.cached = 0

    def cached_prefix_tokens(self) -> int:
        return self.cached

    def finish_update(self, token: str) -> None:
        self.state.finish(token)

    def refuse_all(self) -> None: ...

    def release_memory(self, tags: object) -> Future[bool]:
        raise NotImplementedError

    def resume_memory(self, tags: object) -> Future[None]:
        raise NotImplementedError


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@dataclass
class RunningEngine:
    """A server on its own thread and socket. `middleware` may look at or replace a POST body before it is handled."""

    host: ParameterHost
    service: WeightService
    url: str = ""
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    intercept: Callable[[str, dict[str, Any]], dict[str, Any] | None] = lambda path, body: body
    # What is answered instead of a POST's own reply.
    answer: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda path, reply: reply
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return self.host.parameters()

    def start(self, port: int = 0) -> RunningEngine:
        app = Starlette()
        register_routes(app, self.service)

        async def generate(request: Request) -> JSONResponse:
            if (view := self.host.state.get()).phase == "dirty":
                return JSONResponse({"error": {"type": "weights_dirty", "message": view.reason}}, 503)
            while self.host.state.get().phase != "serving":
                await asyncio.sleep(0.001)
            version, first = self.host.weight_version, next(iter(self.parameters.values()))
            self.host.cached += 4
            return JSONResponse({"weight_version": str(version), "value": first.reshape(-1)[0].item()})

        app.add_route("/generate", generate, methods=["POST"])
        handle = self.service.handle

        async def recorded(path: str, body: bytes, caller: Any = NOBODY) -> tuple[int, dict[str, Any]]:
            message = orjson.loads(body)
            self.seen.append((path, message))
            replaced = self.intercept(path, message)
            if replaced is None:
                return 503, {"success": False, "code": "intercepted", "message": "refused by the test"}
            code, reply = await handle(path, orjson.dumps(replaced), caller)
            return code, self.answer(path, reply)

        self.service.handle = recorded  # type: ignore[method-assign]
        # asyncio switches Nagle off only when the protocol is named: without it each reply costs 40 ms.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, http=watched_protocol(self.service.connection_closed), log_level="warning", lifespan="off"
            )
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.001)
        return self

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.force_exit = self._server.should_exit = True
            self._thread.join(10)


def qwen3_weights(*, seed: int, hidden: int = 64, layers: int = 2, vocab: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (hidden, hidden),
            prefix + "self_attn.v_proj.weight": (hidden, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "self_attn.q_norm.weight": (hidden // 4,),
            prefix + "self_attn.k_norm.weight": (hidden // 4,),
            prefix + "mlp.gate_proj.weight": (3 * hidden, hidden),
            prefix + "mlp.up_proj.weight": (3 * hidden, hidden),
            prefix + "mlp.down_proj.weight": (hidden, 3 * hidden),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def zeros_like(weights: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in weights.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def ask(
    url: str, path: str, body: dict[str, Any] | None = None, *, token: str | None = None
) -> tuple[int, dict[str, Any]]:
    """(HTTP status, reply) of a GET, or of a POST with a body."""
    data = None if body is None else orjson.dumps(body)
    for attempt in range(2):
        try:
            connection = _connection(url)
            connection.request("GET" if body is None else "POST", path, data, access.headers(token))
            reply = connection.getresponse()
            return reply.status, orjson.loads(reply.read())
        except (ConnectionError, http.client.HTTPException):
            # The server closed the idle connection, or is another one at the same port.
            _open.connections.pop(url).close()
            if attempt:
                raise
    raise AssertionError("unreachable")


_open = threading.local()


def _connection(url: str) -> http.client.HTTPConnection:
    """Kept open by each thread, as a trainer does: an update ends with the connection that began it."""
    if not hasattr(_open, "connections"):
        _open.connections = {}
    if url not in _open.connections:
        parts = urllib.parse.urlsplit(url)
        _open.connections[url] = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    return _open.connections[url]


def status(engine: RunningEngine) -> dict[str, Any]:
    return ask(engine.url, "/weight_status")[1]
