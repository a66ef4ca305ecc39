"""`Router`: one address for several engines. Spreads generation requests; control routes go to each engine itself.

Replies are passed on whole, not streamed. Leaves out: retries of anything that reached a worker (a generation is not repeated behind the caller's back), and
weight updates. Our own routes: GET /health, GET|POST /router/workers, POST /router/workers/{remove,drain},
POST /router/required_version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from miles.rollout import access
from miles.rollout.config import RouterConfig
from miles.rollout.workers import Worker, WorkerSet

PROXIED_POST = ("/generate", "/v1/chat/completions", "/v1/completions")
PROXIED_GET = ("/model_info", "/server_info", "/health_generate")
ROUTING_KEY = "x-smg-routing-key"
OTHER_WORKERS = 2
# Of this hop alone, in both directions.
HOP_HEADERS = frozenset({
    "content-length", "transfer-encoding", "content-encoding", "server", "date", "connection", "host", "keep-alive",
})  # fmt: skip


class Router:
    """`app()` is an ASGI application; its lifespan runs the health checks. One event loop."""

    def __init__(self, config: RouterConfig, workers: Iterable[str] = (), *, token: str | None = None) -> None:
        """`token`: what all routes but `/health` want, and what the workers want of the router. None: none."""
        self.config = config
        self._token = token
        self.workers = WorkerSet(config, workers)
        self._session: aiohttp.ClientSession | None = None
        self._drained = asyncio.Event()

    def app(self) -> Any:
        routes = [Route(path, self._proxy, methods=["POST"]) for path in PROXIED_POST]
        routes += [Route(path, self._proxy, methods=["GET"]) for path in PROXIED_GET]
        routes += [
            Route("/health", self._health, methods=["GET"]),
            Route("/router/workers", self._list, methods=["GET"]),
            Route("/router/workers", self._add, methods=["POST"]),
            Route("/router/workers/remove", self._remove, methods=["POST"]),
            Route("/router/workers/drain", self._drain, methods=["POST"]),
            Route("/router/required_version", self._require, methods=["POST"]),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        return app if self._token is None else access.TokenRequired(app, self._token)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            await self.check_all()
            checks = asyncio.create_task(self._check_forever())
            try:
                yield
            finally:
                checks.cancel()
                await asyncio.gather(checks, return_exceptions=True)

    async def check_all(self) -> None:
        """One round of health checks, all workers at once."""
        await asyncio.gather(*(self._check(worker) for worker in self.workers))

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval_s)
            await self.check_all()

    async def _check(self, worker: Worker) -> None:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=self.config.health_timeout_s)
        try:
            async with self._session.get(worker.url + "/health", timeout=timeout) as reply:
                if reply.status != 200:
                    return self.workers.failed(worker, f"health_{reply.status}")
            own = access.headers(self._token)
            async with self._session.get(worker.url + "/model_info", timeout=timeout, headers=own) as reply:
                info = orjson.loads(await reply.read())
            version, state = int(info["weight_version"]), info.get("weight_state", "serving")
            run_id = info.get("weight_run")
        except TimeoutError:
            return self.workers.failed(worker, "health_timeout")
        except (aiohttp.ClientError, OSError):
            return self.workers.failed(worker, "unreachable")
        except (KeyError, TypeError, ValueError):
            return self.workers.failed(worker, "bad_model_info")
        return self.workers.succeeded(worker, weight_version=version, weight_state=state, run_id=run_id)

    async def _proxy(self, request: Request) -> Response:
        key = request.headers.get(ROUTING_KEY)
        if self.config.policy == "session" and not key and request.method == "POST":
            return _error(400, "missing_key", f"router.policy is session: send the header {ROUTING_KEY}")
        body = await request.body()
        upstream = asyncio.ensure_future(self._deliver(request, body, key or ""))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({upstream, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not upstream.done():
                upstream.cancel()  # closes the connection, on which the engine aborts the request
        return upstream.result() if upstream.done() else Response(status_code=499)

    async def _deliver(self, request: Request, body: bytes, key: str) -> Response:
        tried: list[str] = []
        for _ in range(1 + OTHER_WORKERS):
            worker = self.workers.pick(key, without=tried)
            if worker is None:
                break
            tried.append(worker.url)
            worker.inflight += 1
            try:
                return await self._forward(worker, request, body)
            except aiohttp.ClientConnectorError:
                # No byte reached the worker: another one may take it.
                self.workers.failed(worker, "unreachable")
            except TimeoutError:
                return _error(504, "timeout", f"worker {worker.url}: no reply within {self.config.timeout_s:g} s")
            except (aiohttp.ClientError, OSError) as error:
                self.workers.failed(worker, "connection_lost")
                return _error(502, "bad_gateway", f"worker {worker.url}: {type(error).__name__}: {error}")
            finally:
                worker.inflight -= 1
                if worker.inflight == 0:
                    self._drained.set()
        if tried:
            return _error(502, "bad_gateway", f"no connection to {', '.join(tried)}")
        states = ", ".join(f"{w.url} {w.state.value} ({w.reason})" for w in self.workers) or "none registered"
        return _error(503, "no_worker", f"no healthy worker: {states}", {"retry-after": "1"})

    async def _forward(self, worker: Worker, request: Request, body: bytes) -> Response:
        assert self._session is not None
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(k, v) for k, v in request.headers.items() if k not in HOP_HEADERS]
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s, connect=self.config.health_timeout_s)
        async with self._session.request(
            request.method,
            worker.url + path,
            data=body or None,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        ) as reply:
            content = await reply.read()
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in HOP_HEADERS}
            return Response(content, status_code=reply.status, headers=kept)

    async def _health(self, request: Request) -> Response:
        if any(worker.eligible for worker in self.workers):
            return _reply({"status": "ok"})
        return _error(503, "no_worker", "no healthy worker", {"retry-after": "1"})

    async def _list(self, request: Request) -> Response:
        return _reply({
            "policy": self.config.policy,
            "required_version": str(self.workers.required_version),
            "required_run": self.workers.required_run,
            "workers": [worker.describe() for worker in self.workers],
        })  # fmt: skip

    async def _add(self, request: Request) -> Response:
        url = await _field(request, "url", str)
        if url is None:
            return _error(400, "bad_request", "body: expected {url}")
        worker = self.workers.add(url)
        await self._check(worker)
        return _reply(worker.describe())

    async def _remove(self, request: Request) -> Response:
        url = await _field(request, "url", str)
        if url is None or self.workers.remove(url) is None:
            return _error(404, "unknown_worker", f"no worker {url!r}")
        return _reply({"success": True})

    async def _drain(self, request: Request) -> Response:
        """No new requests; answers when the running ones are done, at most `timeout_s`."""
        url = await _field(request, "url", str)
        worker = self.workers.get(url) if url else None
        if worker is None:
            return _error(404, "unknown_worker", f"no worker {url!r}")
        worker.draining = True
        try:
            await asyncio.wait_for(self._until(lambda: worker.inflight == 0), self.config.timeout_s)
        except TimeoutError:
            return _error(504, "timeout", f"worker {worker.url}: {worker.inflight} requests still run")
        return _reply(worker.describe())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._drained.clear()
            await self._drained.wait()

    async def _require(self, request: Request) -> Response:
        """Workers below this weight version, or of another run than `run_id`, are kept out until they report it."""
        version, run_id = await _field(request, "version", int), await _field(request, "run_id", str)
        if version is None or not -1 <= version < 1 << 63:
            return _error(400, "bad_request", "body: expected {version}, an int64 >= -1")
        self.workers.required_version, self.workers.required_run = version, run_id
        await self.check_all()
        return await self._list(request)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _field(request: Request, name: str, kind: type) -> Any:
    try:
        value = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        return None
    found = value.get(name) if isinstance(value, dict) else None
    return found if type(found) is kind else None


def _reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json", headers=headers)


def _error(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    body = {"success": False, "message": message, "error": {"type": kind, "message": message}}
    return _reply(body, status, headers)
