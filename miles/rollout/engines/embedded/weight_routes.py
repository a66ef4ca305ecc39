"""HTTP routes of the embedded engine's weight updates, for any Starlette or FastAPI application.

The routes drive `WeightReceiver` and move the engine through `PausableHost`: pause at begin; flush, verify, set the
version and resume at end; refuse everything when the engine becomes dirty. One update at a time; a
sender that falls silent past its announced timeout leaves the engine dirty.

| route | body -> reply |
|---|---|
| GET /parameter_table | -> {schema, tables, engine_epoch, host, transports, weights} |
| GET /weight_status | -> the receiver's status |
| GET /parameter_digests | -> {digests: {destination: hex digest of what is held now}, weights} |
| POST /begin_weight_update | {schema, run_id, weight_version, selector, plan_digest, table_digest, engine_epoch, pause, timeout_s} -> {session} |
| POST /update_weights_from_tensor | {session, plan_digest, selector, weight_version, load_format, flush_cache, bucket, handle} -> {sequence, digest} |
| POST /init_weights_update_group | {group_name, master_address, master_port, rank_offset, world_size, backend, timeout_s} |
| POST /destroy_weights_update_group | {group_name} |
| POST /update_weights_from_distributed | as from_tensor, with group_name for handle -> {sequence, digest} |
| POST /update_weights_from_disk | {session, ..., load_format: safetensors or miles_delta, model_path, base_version, deltas: [[path, base, version]]} |
| POST /end_weight_update | {session, plan_digest, selector, weight_version, buckets} -> {weights} |
| POST /abort_weight_update | {session, reason} -> {weights} |
Every reply carries {success, message}; a refused request has `code` and HTTP 409 (engine unchanged) or 400 (dirty).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
import torch
from starlette.requests import Request
from starlette.responses import Response

from miles.rollout.engines.embedded.gate import WeightHost
from miles.rollout.engines.embedded.weight_group import WeightGroup
from miles.rollout.engines.embedded.weight_source import open_source
from miles.rollout.engines.embedded.weights import BeginUpdate, WeightReceiver, WeightUpdateError, table_of
from miles.weight_wire.bucket import SCHEMA, BucketHeader, WeightWireError, host_identity, parse_version
from miles.weight_wire.shared_buffer import AttachedBuffers

logger = logging.getLogger(__name__)

INLINE_BYTES = 4 << 20
TRANSPORTS = ("tensor", "broadcast", "disk", "disk_delta")


HOOK_TIMEOUT_S = 120.0


_GROUP_FIELDS = (
    "group_name", "master_address", "master_port", "rank_offset", "world_size", "backend", "timeout_s",
)  # fmt: skip


class PausableHost(WeightHost, Protocol):
    """What weight updates need of the engine. `paused` says whether somebody else already paused it."""

    paused: bool

    def pause(self, mode: str) -> Future[None]:
        """Done once no request computes (retract | abort | in_place); requests that arrive now wait. Idempotent."""

    def resume(self) -> Future[None]: ...

    def flush_caches(self) -> None:
        """Drop every cached prefix; allowed while updating."""


class WeightService:
    """Serialises weight-update messages, bounds their silence and ties them to the engine behind `host`."""

    def __init__(
        self,
        host: PausableHost,
        *,
        receiver: WeightReceiver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.receiver = receiver or WeightReceiver(
            host.parameters(), table_of(host.parameters(), aliases=host.aliases()), version=host.weight_version
        )
        self.buffers = AttachedBuffers()
        self._host = host
        self._resume_after = False
        self._group: WeightGroup | None = None
        self._clock = clock
        self._lock = asyncio.Lock()
        self._watchdog: asyncio.Task[None] | None = None
        self._routes: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "/begin_weight_update": self._begin,
            "/update_weights_from_tensor": self._tensor,
            "/update_weights_from_distributed": self._distributed,
            "/update_weights_from_disk": self._disk,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/end_weight_update": self._end,
            "/abort_weight_update": self._abort,
        }

    @property
    def post_routes(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def describe(self) -> dict[str, Any]:
        return {
            "success": True,
            "message": "",
            "schema": SCHEMA,
            "tables": [self.receiver.table.to_wire()],
            "engine_epoch": self.receiver.epoch,
            "host": host_identity(),
            "transports": list(TRANSPORTS),
            "weights": self.status(),
        }

    def status(self) -> dict[str, Any]:
        # State and version are the host's own, which responses are labelled with: a reader compares those, not a copy.
        gate = self._host.gate_state
        return {
            **self.receiver.status(),
            "state": gate.state,
            "weight_version": str(gate.version),
            "open_handles": self.buffers.count,
        }

    async def digests(self) -> dict[str, Any]:
        """Digests of all parameters; waits for an update in progress to end its current message."""
        async with self._lock:
            digests = await asyncio.to_thread(self.receiver.digests)
        return {"success": True, "message": "", "digests": digests, "weights": self.status()}

    async def handle(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """One POST: (HTTP status, reply). Errors that end the session have already made the engine dirty."""
        async with self._lock:
            was_dirty = self.receiver.refusal() is not None
            try:
                reply = await self._routes[path](_object(body))
                return 200, {"success": True, "message": "", **reply}
            except WeightUpdateError as error:
                status = 400 if error.fatal else 409
                reply = {"code": error.code, "message": str(error), "retry_after_s": error.retry_after_s}
            except WeightWireError as error:
                status, reply = 400, {"code": "bad_wire", "message": str(error)}
            except Exception as error:
                # Whatever went wrong, part of the new weights may be in place: never serve them.
                logger.exception("weight update failed inside the engine")
                self.receiver.abort("internal", repr(error))
                status, reply = 500, {"code": "internal", "message": repr(error)}
            if self.receiver.refusal() is not None and not was_dirty:
                await self._became_dirty()
            return status, {"success": False, **reply, "weights": self.status()}

    async def close(self) -> None:
        """Stop the watchdog and drop every mapping."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._group = None
        self.buffers.close()

    async def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        begin = _read_begin(message)
        self.receiver.check_begin(begin, self._clock())
        token = self.receiver.begin(begin, self._clock())
        if self._watchdog is None or self._watchdog.done():
            self._watchdog = asyncio.create_task(self._watch())
        self._resume_after = not self._host.paused
        await self._bounded(self._host.pause(begin.pause))
        await asyncio.to_thread(self._host.begin_update)
        return {"session": token}

    async def _tensor(self, message: dict[str, Any]) -> dict[str, Any]:
        token, plan_digest = self._session_fields(message)
        with self._wire_errors_are_fatal():
            if message.get("load_format") != "miles_bucket":
                raise WeightWireError(f"load_format {message.get('load_format')!r}: this engine reads 'miles_bucket'")
            header = BucketHeader.from_wire(message.get("bucket"))
            buffer = self.buffers.open(message.get("handle"))
        return await self._load(token, plan_digest, header, buffer)

    async def _distributed(self, message: dict[str, Any]) -> dict[str, Any]:
        token, plan_digest = self._session_fields(message)
        with self._wire_errors_are_fatal():
            header = BucketHeader.from_wire(message.get("bucket"))
            if self._group is None or self._group.name != message.get("group_name"):
                raise WeightWireError(f"this engine is not in weight group {message.get('group_name')!r}")
            try:
                buffer = await asyncio.to_thread(self._group.receive, header.nbytes)
            except RuntimeError as error:
                raise WeightWireError(f"bucket {header.sequence} did not arrive: {str(error)[:200]}") from error
        return await self._load(token, plan_digest, header, buffer)

    async def _load(self, token: str, plan_digest: str, header: BucketHeader, buffer: torch.Tensor) -> dict[str, Any]:
        load = self.receiver.load
        if header.nbytes <= INLINE_BYTES:
            found = load(token, plan_digest, header, buffer, self._clock())
        else:
            found = await asyncio.to_thread(load, token, plan_digest, header, buffer, self._clock())
        return {"sequence": header.sequence, "digest": None if found is None else f"{found:#x}"}

    async def _disk(self, message: dict[str, Any]) -> dict[str, Any]:
        token, plan_digest = self._session_fields(message)
        version = parse_version(message.get("weight_version"))
        with self._wire_errors_are_fatal():
            await asyncio.to_thread(self._load_from_disk, message, token, plan_digest, version)
        return {}

    def _load_from_disk(self, message: dict[str, Any], token: str, plan_digest: str, version: int) -> None:
        receiver = self.receiver
        holds = (receiver.run_id if receiver.intact else None, receiver.version)
        source = open_source(message, receiver.announced_run(token), version, holds)
        receiver.load_named(token, plan_digest, version, source.shapes, source.read, self._clock())

    async def _init_group(self, message: dict[str, Any]) -> dict[str, Any]:
        self._group = None
        try:
            name, address, port, rank, size, backend, timeout_s = (message[key] for key in _GROUP_FIELDS)
            join = functools.partial(
                WeightGroup,
                name,
                address=address,
                port=port,
                rank=rank,
                size=size,
                backend=backend,
                timeout_s=timeout_s,
            )
            self._group = await asyncio.to_thread(join)
        except (KeyError, TypeError, RuntimeError, OSError) as error:
            raise WeightWireError(f"cannot join the weight group: {error!r:.300}") from error
        return {}

    async def _destroy_group(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._group is not None and self._group.name == message.get("group_name"):
            self._group = None
        return {}

    async def _end(self, message: dict[str, Any]) -> dict[str, Any]:
        token, plan_digest = self._session_fields(message)
        version, buckets = parse_version(message.get("weight_version")), message.get("buckets")
        if type(buckets) is not int:
            raise WeightWireError("end_weight_update needs buckets, the number sent")
        self.receiver.complete(token, plan_digest, version, buckets)
        await self._flush_and_verify(version)
        self.buffers.close()
        self.receiver.finish(token)
        await asyncio.to_thread(self._host.finish_update, version)
        await self._resume()
        return {"weights": self.status()}

    async def _flush_and_verify(self, version: int) -> None:
        """Nothing computed by older weights may be left when this version is first served."""
        await asyncio.to_thread(self._host.flush_caches)
        left = self._host.cached_prefix_tokens()
        if left:
            message = f"{left} tokens computed before version {version} are still cached after the flush"
            self.receiver.abort("flush_failed", message)
            raise WeightUpdateError("flush_failed", message)

    async def _abort(self, message: dict[str, Any]) -> dict[str, Any]:
        self.receiver.abort_session(str(message.get("session")), str(message.get("reason", "no reason given")))
        await self._became_dirty()
        return {"weights": self.status()}

    async def _became_dirty(self) -> None:
        self.buffers.close()
        await asyncio.to_thread(self._host.fail_update, self.receiver.refusal() or "")
        await self._resume()

    async def _resume(self) -> None:
        """Undo our own pause; one that was there before stays."""
        if self._resume_after:
            self._resume_after = False
            await self._bounded(self._host.resume())

    async def _bounded(self, future: Future[None]) -> None:
        await asyncio.wait_for(asyncio.wrap_future(future), HOOK_TIMEOUT_S)

    async def _watch(self) -> None:
        while (left := self.receiver.seconds_left(self._clock())) is not None:
            await asyncio.sleep(max(left, 0.001))
            async with self._lock:
                if self.receiver.expire(self._clock()):
                    await self._became_dirty()

    def _session_fields(self, message: dict[str, Any]) -> tuple[str, str]:
        """Token and plan digest; a message of another session is refused before anything of it is believed."""
        token = str(message.get("session"))
        self.receiver.require_session(token)
        selector = message.get("selector")
        self.receiver.require_selector(token, selector if isinstance(selector, str) else tuple(selector or ()))
        return token, str(message.get("plan_digest"))

    @contextmanager
    def _wire_errors_are_fatal(self) -> Iterator[None]:
        try:
            yield
        except WeightWireError as error:
            self.receiver.abort("bad_wire", str(error))
            raise


def register_routes(app: Any, service: WeightService) -> None:
    """Mount the update routes on a Starlette or FastAPI application."""

    async def post(request: Request) -> Response:
        status, reply = await service.handle(request.url.path, await request.body())
        return _json(status, reply)

    async def parameter_table(request: Request) -> Response:
        return _json(200, service.describe())

    async def weight_status(request: Request) -> Response:
        return _json(200, service.status())

    async def parameter_digests(request: Request) -> Response:
        return _json(200, await service.digests())

    for path in service.post_routes:
        app.add_route(path, post, methods=["POST"])
    app.add_route("/parameter_table", parameter_table, methods=["GET"])
    app.add_route("/weight_status", weight_status, methods=["GET"])
    app.add_route("/parameter_digests", parameter_digests, methods=["GET"])


def _json(status: int, value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WeightWireError(f"weight update body is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WeightWireError("weight update body must be a JSON object")
    return message


def _read_begin(message: dict[str, Any]) -> BeginUpdate:
    if message.get("schema") != SCHEMA:
        raise WeightWireError(f"begin_weight_update schema {message.get('schema')!r}: this engine reads {SCHEMA}")
    selector, timeout_s = message.get("selector"), message.get("timeout_s")
    texts = {key: message.get(key) for key in ("run_id", "plan_digest", "table_digest", "engine_epoch", "pause")}
    wrong = [key for key, value in texts.items() if not isinstance(value, str)]
    if wrong or not isinstance(timeout_s, int | float):
        raise WeightWireError(f"begin_weight_update: {wrong or ['timeout_s']} missing or of the wrong type")
    if selector != "all" and not (isinstance(selector, list) and all(isinstance(m, str) for m in selector)):
        raise WeightWireError('begin_weight_update: selector must be "all" or a list of module names')
    return BeginUpdate(
        version=parse_version(message.get("weight_version")),
        selector="all" if selector == "all" else tuple(selector),
        timeout_s=float(timeout_s),
        **texts,
    )
