"""HTTP front of the embedded engine: the routes of the engine contract on a Starlette application."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from miles.rollout.engines.embedded.fields import Fields, read_body, read_object
from miles.rollout.engines.embedded.generate_body import parse_generate
from miles.rollout.engines.embedded.requests import EngineRequest, Job, Limits, Output, Refusal, reply_for
from miles.rollout.engines.embedded.scheduler import PAUSE_MODES, USER, Scheduler
from miles.rollout.engines.embedded.weight_host import UPDATE_PAUSE
from miles.rollout.engines.embedded.weight_routes import disconnected, register_routes
from miles.rollout.engines.embedded.weight_service import WeightService

CAPABILITIES = (
    "generate", "batch_generate", "seeded_sampling", "sampling_mask", "prefix_cache", "pause", "abort_request",
    "begin_end_weight_update", "update_weights_from_tensor", "parameter_table", "release_memory",
    "min_weight_version",
)  # fmt: skip
HEALTH_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 60.0
MEMORY_TAGS = ("weights", "kv_cache")
# Room for MAX_BATCH prompts of the clients, as JSON.
GENERATE_BYTES = 256 << 20


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def error_reply(status: int, kind: str, message: str) -> Response:
    return json_reply({"success": False, "message": message, "error": {"type": kind, "message": message}}, status)


class EngineServer:
    """`info` is what `/server_info` reports beside the load."""

    def __init__(self, scheduler: Scheduler, limits: Limits, info: Mapping[str, Any]) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._info = dict(info)
        self.weights = WeightService(scheduler)

    def app(self) -> Starlette:
        post = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }
        get = {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
        }
        routes = [Route(path, fn, methods=["POST"]) for path, fn in post.items()]
        routes += [Route(path, fn, methods=["GET"]) for path, fn in get.items()]
        routes.append(Route("/flush_cache", self.flush, methods=["GET"]))
        app = Starlette(routes=routes, exception_handlers={Exception: _internal})
        register_routes(app, self.weights)
        return app

    async def generate(self, request: Request) -> Response:
        requests, batched = parse_generate(
            read_object(await read_body(request.receive, most=GENERATE_BYTES)), self._limits
        )
        results = await self._run(requests, request)
        if results is None:
            return Response(status_code=499)
        outputs: list[Output] = []
        for result in results:
            if isinstance(result, Refusal):
                return error_reply(result.status, result.kind, result.message)
            outputs.append(result)
        replies = [reply_for(r, out) for r, out in zip(requests, outputs, strict=True)]
        return json_reply(replies if batched else replies[0])

    async def _run(self, requests: list[EngineRequest], connection: Request | None) -> list[Output | Refusal] | None:
        """Results in order; None when the client went away, which aborts its requests."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not finished.done():
                finished.set_result(None)

        job = Job(requests, lambda _: loop.call_soon_threadsafe(settle))
        self._scheduler.submit(job)
        if connection is None:
            await finished
            return job.answers()
        gone = asyncio.create_task(disconnected(connection))
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not finished.done():
                self._scheduler.abort_requests(requests)
        return job.answers() if finished.done() else None

    async def pause(self, request: Request) -> Response:
        fields = await _fields(request)
        mode, owner = fields.choice("mode", PAUSE_MODES, "abort"), _owner(fields)
        fields.done()
        await self._wait(self._scheduler.pause(mode, owner))
        return json_reply({"success": True, "message": f"paused ({mode})"})

    async def resume(self, request: Request) -> Response:
        """Ends the caller's own pause; the engine goes on when no other owner holds one."""
        fields = await _fields(request)
        owner = _owner(fields)
        fields.done()
        await self._wait(self._scheduler.resume(owner))
        left = self._scheduler.pauses
        message = f"still paused by {', '.join(left)}" if left else "continued"
        return json_reply({"success": True, "message": message})

    async def abort(self, request: Request) -> Response:
        fields = await _fields(request)
        everything, prefix = fields.flag("abort_all", False), fields.flag("prefix", False)
        rid = fields.text("rid", None)
        if rid is None and not everything:
            raise fields.bad("rid", "expected a text, or abort_all=true")
        fields.done()
        if everything:
            count = await self._wait(self._scheduler.abort(lambda r: True))
        elif prefix:
            count = await self._wait(self._scheduler.abort(lambda r: r.startswith(rid)))
        else:
            count = await self._wait(self._scheduler.abort(lambda r: r == rid))
        return json_reply({"success": True, "message": f"{count} requests ended", "aborted": count})

    async def flush(self, request: Request) -> Response:
        (await _fields(request)).done()
        if await self._wait(self._scheduler.flush()):
            return json_reply({"success": True, "message": "flushed"})
        return error_reply(400, "busy", "the cache is not flushed while requests run; pause or wait, then try again")

    async def release_memory(self, request: Request) -> Response:
        if await self.weights.release_memory(await _tags(request)):
            return json_reply({"success": True, "message": "released", "held": self._scheduler.held_bytes()})
        return error_reply(400, "busy", "memory is not released while requests run; pause with abort or retract first")

    async def resume_memory(self, request: Request) -> Response:
        await self.weights.resume_memory(await _tags(request))
        return json_reply({"success": True, "message": "resumed", "held": self._scheduler.held_bytes()})

    async def health(self, request: Request) -> Response:
        failure = self._scheduler.failure
        if failure:
            return error_reply(503, "engine_failed", failure)
        return json_reply({"status": "ok"})

    async def health_generate(self, request: Request) -> Response:
        """One token through the whole engine."""
        if self._scheduler.paused:
            return error_reply(503, "paused", "the engine is paused; POST /continue_generation")
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        requests, _ = parse_generate(body, self._limits)
        try:
            results = await asyncio.wait_for(self._run(requests, request), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return error_reply(503, "timeout", f"no token within {HEALTH_TIMEOUT_S:g} s")
        for result in results or []:
            if isinstance(result, Refusal):
                return error_reply(503, result.kind, result.message)
        return json_reply({"status": "ok"})

    async def model_info(self, request: Request) -> Response:
        view = self._scheduler.state.get()
        return json_reply({
            "model_path": self._info["model_path"],
            "weight_version": str(view.version),
            "weight_run": view.run_id,
            "weight_state": view.phase,
            "is_generation": True,
        })  # fmt: skip

    async def server_info(self, request: Request) -> Response:
        load = self._scheduler.load()
        pauses = self._scheduler.pauses
        paused = {"paused": bool(pauses), "pauses": [{"owner": owner, "mode": mode} for owner, mode in pauses.items()]}
        return json_reply({**self._info, "capabilities": CAPABILITIES, **paused, "load": load})

    @staticmethod
    async def _wait(future: Any) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(future), COMMAND_TIMEOUT_S)


async def _internal(request: Request, error: Exception) -> Response:
    return error_reply(500, "internal", f"{type(error).__name__}: {error!s:.300}")


async def _fields(request: Request) -> Fields:
    return Fields(read_object(await read_body(request.receive)))


def _owner(fields: Fields) -> str:
    owner = fields.text("owner", USER)
    if owner == UPDATE_PAUSE:
        raise fields.bad("owner", f"{UPDATE_PAUSE!r} is the engine's own")
    return owner


async def _tags(request: Request) -> tuple[str, ...]:
    fields = await _fields(request)
    tags = fields.texts("tags", MEMORY_TAGS, most=len(MEMORY_TAGS))
    if not set(tags) <= set(MEMORY_TAGS):
        raise fields.bad("tags", f"expected a list out of {', '.join(MEMORY_TAGS)}")
    fields.done()
    return tags
