"""HTTP routes of the engine's weight updates, for any Starlette application.

| route | body -> reply |
|---|---|
| GET /parameter_table | -> {schema, tables, engine_epoch, host, transports, weights} |
| GET /weight_status | -> {state, weight_version, run_id, plan_digest, allowed, ...} |
| GET /parameter_digests | -> {digests: {destination: hex digest of what is held now}, weights} |
| POST /begin_weight_update | {schema, run_id, weight_version, selector, plan_digest, table_digest, engine_epoch, pause, timeout_s} -> {session} |
| POST /update_weights_from_tensor | {session, plan_digest, selector, weight_version, load_format, flush_cache, bucket, handle} -> {sequence, digest} |
| POST /init_weights_update_group | {group_name, master_address, master_port, rank_offset, world_size, backend, timeout_s} |
| POST /destroy_weights_update_group | {group_name} |
| POST /update_weights_from_distributed | as from_tensor, with group_name for handle -> {sequence, digest} |
| POST /update_weights_from_disk | {session, ..., load_format: safetensors or miles_delta, model_path, base_version, deltas: [[path, base, version]]} |
| POST /end_weight_update | {session, plan_digest, selector, weight_version, buckets} -> {weights} |
| POST /abort_weight_update | {session, reason} -> {weights} |
Every reply carries {success, message}. A refused request has `code`, and status 422 (a field out of bounds) or 409
(not now; `weights.allowed` says what is) when the engine is unchanged, 400 when its own update failed.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from miles.rollout.engines.embedded.fields import BadRequest, read_body
from miles.rollout.engines.embedded.network_wait import Caller
from miles.rollout.engines.embedded.weight_service import WeightService
from miles.rollout.engines.embedded.weight_state import WeightUpdateError

# A bucket names its pieces: some hundred bytes each.
BODY_BYTES = 16 << 20


def register_routes(app: Any, service: WeightService) -> None:
    """Mount the update routes on a Starlette application."""

    async def post(request: Request) -> Response:
        body = await read_body(request.receive, most=BODY_BYTES)
        gone = asyncio.ensure_future(disconnected(request))
        try:
            status, reply = await service.handle(request.url.path, body, Caller(request.scope.get("client"), gone))
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
        return _json(status, reply)

    async def parameter_table(request: Request) -> Response:
        return _json(200, service.describe())

    async def weight_status(request: Request) -> Response:
        return _json(200, service.status())

    async def parameter_digests(request: Request) -> Response:
        return _json(200, await service.digests())

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, WeightUpdateError)
        reply = {"success": False, "code": error.code, "message": str(error), "weights": service.status()}
        return _json(409, {**reply, "error": {"type": error.code, "message": str(error)}})

    app.add_exception_handler(BadRequest, bad_request)
    app.add_exception_handler(WeightUpdateError, refused)
    for path in service.post_routes:
        app.add_route(path, post, methods=["POST"])
    app.add_route("/parameter_table", parameter_table, methods=["GET"])
    app.add_route("/weight_status", weight_status, methods=["GET"])
    app.add_route("/parameter_digests", parameter_digests, methods=["GET"])


async def bad_request(request: Request, error: Exception) -> Response:
    """A field out of bounds, by name."""
    assert isinstance(error, BadRequest)
    detail = {"type": "bad_request", "field": error.field, "message": str(error)}
    reply = {"success": False, "code": "bad_request", "field": error.field, "message": str(error), "error": detail}
    return _json(error.status, reply)


async def disconnected(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(status: int, value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
