"""`Engine`, what a rollout asks of an engine, and `EngineClient`: the client side of the engine contract, for the embedded engine and for SGLang servers.

Token ids in, token ids out; text is refused by having no place for it. Concurrent `generate` calls of one event-loop
tick travel as one batched request. Every wait is bounded and every reply is checked before anyone sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from miles.rollout import access
from miles.rollout.engines.sglang import wire as sglang_wire
from miles.rollout.errors import EngineCapabilityError, EngineHttpError, EngineReplyError, EngineUnreachable
from miles.rollout.messages import GenerateRequest, GenerateResult, SamplingParams, batch_body, is_version, read_replies

__all__ = ["Engine", "EngineClient", "EngineInfo", "GenerateRequest", "GenerateResult", "SamplingParams"]

MAX_BATCH = 1024
CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0

_Key = tuple[int, bool, str | None, int]

# Routes by which a stock build without a capability list shows what it offers.
_ROUTE_CAPABILITIES = {
    "/generate": ("generate", "batch_generate"),
    "/pause_generation": ("pause",),
    "/abort_request": ("abort_request",),
    "/begin_weight_update": ("begin_end_weight_update",),
    "/update_weights_from_tensor": ("update_weights_from_tensor",),
    "/update_weights_from_distributed": ("update_weights_from_distributed",),
    "/update_weights_from_disk": ("update_weights_from_disk",),
    "/release_memory_occupation": ("release_memory",),
    "/parameter_table": ("parameter_table",),
}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine said about itself, read once."""

    url: str
    engine: str
    version: str
    capabilities: frozenset[str]
    context_length: int | None
    vocab_size: int | None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    def require(self, capability: str) -> None:
        if capability not in self.capabilities:
            raise EngineCapabilityError(
                f"engine {self.url} ({self.engine} {self.version}) lacks {capability!r}; it offers "
                f"{', '.join(sorted(self.capabilities))}"
            )


class Engine(Protocol):
    """What a rollout needs of `EngineClient` or `EnginePool`."""

    url: str

    async def info(self) -> EngineInfo: ...
    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]: ...


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate_many`: its requests and where their results go."""

    requests: Sequence[GenerateRequest]
    future: asyncio.Future[list[GenerateResult]]

    @property
    def key(self) -> _Key:
        first = self.requests[0]
        return first.batch_key, first.return_sampling_mask, first.lora_path, first.min_weight_version


class EngineClient:
    """One engine. Use as `async with`, inside one event loop. `token`: what its routes want (`miles.rollout.access`).

    `vocab_size`: for engines that do not report theirs; ids of replies are checked against it. `timeout_s` bounds
    one generate call from send to reply, with `version_wait_s` on top where the engine holds it for a weight version.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        vocab_size: int | None = None,
        timeout_s: float = 600.0,
        version_wait_s: float = 3600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._access = access.headers(token)
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._version_wait_s = version_wait_s
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._pending: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self) -> EngineInfo:
        """Read once: `/server_info`, and `/openapi.json` where the build lists no capabilities."""
        if self._info is None:
            raw = await self._json("GET", "/server_info")
            capabilities = raw.get("capabilities")
            if capabilities is None:
                paths = (await self._json("GET", "/openapi.json")).get("paths", {})
                capabilities = [name for path, names in _ROUTE_CAPABILITIES.items() if path in paths for name in names]
            self._info = EngineInfo(
                url=self.url,
                engine=raw.get("engine", "sglang"),
                version=str(raw.get("version", "unknown")),
                capabilities=frozenset(capabilities),
                context_length=raw.get("context_length"),
                vocab_size=raw.get("vocab_size") or self._vocab_size,
                raw=raw,
            )
            if self._vocab_size is None:
                self._vocab_size = self._info.vocab_size
        return self._info

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One sequence; joins the other calls of this tick."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Several sequences that share key and flags, results in order; at least one. Cancelling aborts them."""
        info = self._info or await self.info()
        first = requests[0]
        if self._vocab_size is None:
            raise EngineCapabilityError(
                f"engine {self.url} does not report its vocabulary size; pass vocab_size to EngineClient"
            )
        if info.engine == "sglang":
            sglang_wire.check_request(requests, self.url)
        if first.return_sampling_mask:
            info.require("sampling_mask")
        if first.lora_path is not None:
            info.require("lora")
        if first.min_weight_version:
            info.require("min_weight_version")
        loop = asyncio.get_running_loop()
        call = _Call(requests, loop.create_future())
        if not self._pending:
            loop.call_soon(self._send_pending)
        self._pending.append(call)
        return await call.future

    async def weight_version(self) -> int:
        """The version that the engine serves (the last complete one)."""
        text = (await self._json("GET", "/model_info")).get("weight_version")
        if not is_version(text):
            raise EngineReplyError(
                f"engine {self.url}: /model_info: weight_version {str(text)[:80]!r} is not a decimal string"
            )
        return int(text)

    async def pause(self, mode: str = "retract") -> None:
        await self._json("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._json("POST", "/continue_generation", {})

    async def abort(self, rid: str | None = None, *, prefix: bool = False) -> None:
        """End one request, those whose id begins with `rid` (`prefix`), or all (`rid` None)."""
        body = {"abort_all": True} if rid is None else {"rid": rid, **({"prefix": True} if prefix else {})}
        await self._json("POST", "/abort_request", body)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """`EngineReplyError` when the engine says that it still holds some of it (`held`, bytes by tag)."""
        reply = await self._json("POST", "/release_memory_occupation", {"tags": list(tags)})
        held = reply.get("held", {}) if isinstance(reply, dict) else {}
        kept = {tag: held[tag] for tag in tags if held.get(tag, 0) != 0}
        if kept:
            raise EngineReplyError(f"engine {self.url}: /release_memory_occupation: still holds bytes of {kept}")

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self._json("POST", "/resume_memory_occupation", {"tags": list(tags)})

    def _send_pending(self) -> None:
        """One task for each HTTP call: equal key and flags, about MAX_BATCH sequences."""
        batches: dict[_Key, list[_Call]] = {}
        for call in self._pending:
            if not call.future.cancelled():
                batches.setdefault(call.key, []).append(call)
        self._pending = []
        for calls in batches.values():
            for part in _parts(calls):
                self._start(part)

    def _start(self, calls: list[_Call]) -> None:
        task = asyncio.get_running_loop().create_task(self._send(calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def settled(_: asyncio.Future[list[GenerateResult]]) -> None:
            # Nobody waits any more: closing the connection makes the engine abort the batch.
            if not task.done() and all(call.future.cancelled() for call in calls):
                task.cancel()

        for call in calls:
            call.future.add_done_callback(settled)

    async def _send(self, calls: list[_Call]) -> None:
        requests = [request for call in calls for request in call.requests]
        try:
            timeout_s = self._timeout_s + (self._version_wait_s if requests[0].min_weight_version else 0.0)
            replies = await self._json("POST", "/generate", batch_body(requests), timeout_s=timeout_s)
            assert self._vocab_size is not None
            assert self._info is not None
            if self._info.engine == "sglang":
                replies = sglang_wire.in_our_form(replies, requests)
            results = read_replies(replies, requests, vocab_size=self._vocab_size, engine=self.url)
        except Exception as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)
                    call.future.exception()  # seen, even if that caller was cancelled meanwhile
            return
        except asyncio.CancelledError:
            for call in calls:
                call.future.cancel()
            raise
        start = 0
        for call in calls:
            end = start + len(call.requests)
            if not call.future.done():
                call.future.set_result(results[start:end])
            start = end

    async def _json(self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """One call. Non-200 and `success: false` are `EngineHttpError`; no reply in time is `EngineUnreachable`."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        headers = {**self._access, **({"content-type": "application/json"} if data is not None else {})}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                status, raw = response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnreachable(f"engine {self.url}: no reply to {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"engine {self.url}: {path} failed: {type(error).__name__}: {error}") from error
        return self._checked(path, status, raw)

    def _checked(self, path: str, status: int, raw: bytes) -> Any:
        try:
            value = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError:
            value = None
        if status != 200 or (isinstance(value, dict) and value.get("success") is False):
            detail = value if isinstance(value, dict) else {}
            said = detail.get("error")
            error = said if isinstance(said, dict) else {}
            message = error.get("message") or detail.get("message") or raw[:300].decode(errors="replace")
            kind = str(error.get("type", "http_error"))
            raise EngineHttpError(
                f"engine {self.url}: {path} answered {status} {kind}: {message}", status=status, kind=kind
            )
        if value is None:
            raise EngineReplyError(f"engine {self.url}: {path} answered no JSON: {raw[:100]!r}")
        return value


def _parts(calls: list[_Call]) -> list[list[_Call]]:
    """Consecutive calls, closed once they hold MAX_BATCH sequences."""
    parts: list[list[_Call]] = [[]]
    count = 0
    for call in calls:
        if count >= MAX_BATCH:
            parts.append([])
            count = 0
        parts[-1].append(call)
        count += len(call.requests)
    return parts
