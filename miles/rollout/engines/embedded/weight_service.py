"""`WeightService`: one weight message at a time, from its checked body to the engine behind it.

Pause at begin; flush, verify, set the version and resume at end; refuse everything when an update fails. An update
belongs to the connection that began it and ends with it; one that falls silent past its timeout ends too. A message
that is malformed, or of no session, changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from miles.rollout.engines.embedded import weight_messages as messages
from miles.rollout.engines.embedded.fields import Fields, read_object
from miles.rollout.engines.embedded.network_wait import NOBODY, Caller, ClientLeft, NetworkWaits
from miles.rollout.engines.embedded.weight_group import WeightGroup
from miles.rollout.engines.embedded.weight_host import UPDATE_PAUSE, WeightHost
from miles.rollout.engines.embedded.weight_source import open_source
from miles.rollout.engines.embedded.weight_state import BeginUpdate, WeightUpdateError
from miles.rollout.engines.embedded.weights import WeightReceiver, table_of
from miles.weight_wire.bucket import SCHEMA, BucketHeader, WeightWireError, host_identity
from miles.weight_wire.shared_buffer import AttachedBuffers

logger = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_BYTES = 4 << 20
TRANSPORTS = ("tensor", "broadcast", "disk", "disk_delta")
HOOK_TIMEOUT_S = 120.0
# Waits on the network whose client left and that have not run out yet.
MAX_ABANDONED = 8


class WeightService:
    """Serialises weight-update messages and ties them to the engine behind `host`."""

    def __init__(
        self, host: WeightHost, *, receiver: WeightReceiver | None = None, clock: Callable[[], float] = time.monotonic
    ):
        parameters = host.parameters()
        self.receiver = receiver or WeightReceiver(parameters, table_of(parameters, aliases=host.aliases()), host.state)
        self.buffers = AttachedBuffers()
        self._host = host
        self._state = host.state
        self._group: WeightGroup | None = None
        self._clock = clock
        self._lock = asyncio.Lock()
        self._watchdog: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits = NetworkWaits()
        self._routes: dict[str, tuple[Callable[[Fields], Any], Callable[[Any, Caller], Awaitable[dict[str, Any]]]]] = {
            "/begin_weight_update": (messages.read_begin, self._begin),
            "/update_weights_from_tensor": (messages.read_tensor, self._tensor),
            "/update_weights_from_distributed": (messages.read_distributed, self._distributed),
            "/update_weights_from_disk": (messages.read_disk, self._disk),
            "/init_weights_update_group": (messages.read_group, self._join_group),
            "/destroy_weights_update_group": (messages.read_group_name, self._leave_group),
            "/end_weight_update": (messages.read_end, self._end),
            "/abort_weight_update": (messages.read_abort, self._abort),
        }

    @property
    def waiting_for_nobody(self) -> int:
        """Waits on the network that their clients left; each ends at its own limit."""
        return self._waits.abandoned

    @property
    def post_routes(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def describe(self) -> dict[str, Any]:
        return {
            "success": True,
            "message": "",
            "schema": SCHEMA,
            "tables": [self.receiver.table.to_wire()],
            "engine_epoch": self._state.epoch,
            "host": host_identity(),
            "transports": list(TRANSPORTS),
            "weights": self.status(),
        }

    def status(self) -> dict[str, Any]:
        return {
            **self._state.status(),
            "table_digest": self.receiver.table.table_digest,
            "open_handles": self.buffers.count,
        }

    async def digests(self) -> dict[str, Any]:
        """Digests of all parameters; waits for an update in progress to end its current message."""
        async with self._lock:
            self._state.require("read_weights")
            digests = await asyncio.to_thread(self.receiver.digests)
        return {"success": True, "message": "", "digests": digests, "weights": self.status()}

    async def release_memory(self, tags: Sequence[str]) -> bool:
        """False while requests run. Not during an update, and not while the parameters are read."""
        async with self._lock:
            return await self._bounded(self._host.release_memory(tags))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        async with self._lock:
            await self._bounded(self._host.resume_memory(tags))

    async def handle(self, path: str, body: bytes, caller: Caller = NOBODY) -> tuple[int, dict[str, Any]]:
        """One POST: (HTTP status, reply). 400: this message ended its own session, the engine is dirty."""
        read, act = self._routes[path]
        message = read(Fields(read_object(body)))
        async with self._lock:
            # Who left while waiting for the turn has no session to begin and no reply to get.
            if caller.left:
                return 499, {"success": False, "code": "client_left", "message": "", "weights": self.status()}
            try:
                reply = await act(message, caller)
                return 200, {"success": True, "message": "", **reply}
            except WeightUpdateError as error:
                status = 400 if error.fatal else 409
                reply = {"code": error.code, "message": str(error), "retry_after_s": error.retry_after_s}
            except WeightWireError as error:
                status, reply = 400, {"code": "bad_wire", "message": str(error)}
            except ClientLeft:
                status, reply = 499, {"code": "client_left", "message": "the connection was closed meanwhile"}
            except Exception as error:
                logger.exception("a weight message failed inside the engine")
                status, reply = 500, {"code": "internal", "message": repr(error)[:500]}
            return status, {"success": False, **reply, "weights": self.status()}

    def connection_closed(self, client: Hashable) -> None:
        """A connection is gone, and with it the update that it began. Called on the event loop."""

        async def end() -> None:
            async with self._lock:
                session = self._state.session
                if session is not None and session.client == client:
                    self._state.fail(session.token, "client_left", "the client that began it closed its connection")
                    await self._became_dirty()

        session = self._state.session
        # Also while a begin of this client may still wait for its turn.
        if client is not None and (self._lock.locked() or (session is not None and session.client == client)):
            task = asyncio.get_running_loop().create_task(end())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop the watchdog and drop every mapping."""
        self._stop_watching()
        self._group = None
        self.buffers.close()

    async def _begin(self, begin: BeginUpdate, caller: Caller) -> dict[str, Any]:
        self._state.check_begin(begin, self._clock())
        self.receiver.check_begin(begin)
        try:
            await self._bounded(self._host.pause(begin.pause, UPDATE_PAUSE))
            session = await asyncio.to_thread(self._host.begin_update, begin, self._clock(), caller.client)
        except BaseException:
            await self._resume()
            raise
        self.buffers.close()
        self.receiver.start(session)
        # A new one: the old one may still sleep until another session's deadline.
        self._stop_watching()
        self._watchdog = asyncio.create_task(self._watch())
        return {"session": session.token}

    async def _tensor(self, message: messages.BucketMessage, caller: Caller) -> dict[str, Any]:
        async with self._in_session(message.session):
            header = BucketHeader.from_wire(message.bucket)
            buffer = self.buffers.open(message.handle)
            return await self._load(message.session, header, buffer)

    async def _distributed(self, message: messages.BucketMessage, caller: Caller) -> dict[str, Any]:
        async with self._in_session(message.session):
            header = BucketHeader.from_wire(message.bucket)
            group = self._group
            if group is None or group.name != message.group_name:
                raise WeightWireError(f"this engine is not in weight group {message.group_name!r}")
            try:
                buffer = await self._waits.run(functools.partial(group.receive, header.nbytes), caller)
            except RuntimeError as error:
                raise WeightWireError(f"bucket {header.sequence} did not arrive: {str(error)[:200]}") from error
            except ClientLeft:
                # The abandoned wait still writes into the group's memory.
                self._group = None
                raise
            return await self._load(message.session, header, buffer)

    async def _load(self, session: messages.InSession, header: BucketHeader, buffer: torch.Tensor) -> dict[str, Any]:
        load = functools.partial(self.receiver.load, session.token, session.plan_digest, header, buffer, self._clock())
        found = load() if header.nbytes <= INLINE_BYTES else await asyncio.to_thread(load)
        return {"sequence": header.sequence, "digest": None if found is None else f"{found:#x}"}

    async def _disk(self, message: messages.DiskMessage, caller: Caller) -> dict[str, Any]:
        async with self._in_session(message.session):
            await asyncio.to_thread(self._load_from_disk, message)
        return {}

    def _load_from_disk(self, message: messages.DiskMessage) -> None:
        sent, view = message.session, self._state.get()
        holds = (view.run_id if view.intact else None, view.version)
        source = open_source(message, self._state.require_session(sent.token).begin.run_id, holds)
        self.receiver.load_named(sent.token, sent.plan_digest, sent.version, source.shapes, source.read, self._clock())

    async def _join_group(self, message: messages.GroupMessage, caller: Caller) -> dict[str, Any]:
        self._state.require("change_group")
        if self._waits.abandoned >= MAX_ABANDONED:
            raise WeightUpdateError(
                "busy", f"{self._waits.abandoned} joins whose clients left still wait", fatal=False, retry_after_s=1.0
            )
        join = functools.partial(WeightGroup, **asdict(message))
        try:
            self._group = await self._waits.run(join, caller)
        except (RuntimeError, OSError, ValueError) as error:
            raise WeightWireError(f"cannot join the weight group: {error!r:.300}") from error
        return {}

    async def _leave_group(self, name: str, caller: Caller) -> dict[str, Any]:
        self._state.require("change_group")
        if self._group is not None and self._group.name == name:
            self._group = None
        return {}

    async def _end(self, message: messages.EndMessage, caller: Caller) -> dict[str, Any]:
        session = message.session
        async with self._in_session(session):
            self.receiver.complete(session.token, session.plan_digest, session.version, message.buckets)
            await self._flush_and_verify(session)
            self.buffers.close()
            await asyncio.to_thread(self._host.finish_update, session.token)
        await self._resume()
        return {"weights": self.status()}

    async def _flush_and_verify(self, session: messages.InSession) -> None:
        """Nothing computed by older weights may be left when this version is first served."""
        await asyncio.to_thread(self._host.flush_caches)
        left = self._host.cached_prefix_tokens()
        if left:
            message = f"{left} tokens computed before version {session.version} are still cached after the flush"
            self._state.fail(session.token, "flush_failed", message)
            raise WeightUpdateError("flush_failed", message)

    async def _abort(self, message: tuple[str, str], caller: Caller) -> dict[str, Any]:
        token, reason = message
        self._state.fail(token, "aborted", reason)
        await self._became_dirty()
        return {"weights": self.status()}

    @asynccontextmanager
    async def _in_session(self, sent: messages.InSession) -> AsyncIterator[None]:
        """A message of the update in progress: whatever fails in it fails the update. Others change nothing."""
        self._state.require_session(sent.token)
        try:
            self.receiver.require_selector(sent.token, sent.selector)
            yield
        except BaseException as error:
            if self._state.session is not None:
                # Part of the new weights may be in place: never serve them.
                code = "bad_wire" if isinstance(error, WeightWireError) else "internal"
                code = "client_left" if isinstance(error, ClientLeft) else code
                self._state.fail(sent.token, code, str(error) or repr(error))
            await self._became_dirty()
            raise

    async def _became_dirty(self) -> None:
        self.buffers.close()
        await asyncio.to_thread(self._host.refuse_all)
        await self._resume()

    async def _resume(self) -> None:
        await self._bounded(self._host.resume(UPDATE_PAUSE))

    @staticmethod
    async def _bounded(future: Future[T]) -> T:
        return await asyncio.wait_for(asyncio.wrap_future(future), HOOK_TIMEOUT_S)

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _watch(self) -> None:
        while (session := self._state.session) is not None:
            await asyncio.sleep(max(session.deadline - self._clock(), 0.001))
            async with self._lock:
                if self._state.expire(self._clock()):
                    await self._became_dirty()
