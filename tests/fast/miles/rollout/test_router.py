"""The router over real HTTP: spreading, affinity, worker states, and what happens when either side breaks."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.access import headers
from miles.rollout.config import RouterConfig
from miles.rollout.engine import EngineClient, GenerateRequest, SamplingParams
from miles.rollout.http_server import listen, url_of
from miles.rollout.router import ROUTING_KEY, Router
from miles.rollout.workers import WorkerSet, WorkerState


class FakeWorker:
    """An engine-like server that counts, may block, and can be made sick."""

    def __init__(self, name):
        self.name, self.version, self.sick, self.served, self.cancelled = name, 5, False, 0, 0
        self.block: asyncio.Event | None = None
        self.headers: dict[str, str] = {}

    async def start(self):
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._info)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _generate(self, request):
        self.headers = dict(request.headers)
        await request.read()
        if self.block is not None:
            try:
                await self.block.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        self.served += 1
        return web.json_response({"worker": self.name}, headers={"x-extra": "kept", "server": "secret"})

    async def _health(self, request):
        return web.Response(status=503 if self.sick else 200)

    async def _info(self, request):
        return web.json_response({"weight_version": str(self.version)})


class Setup:
    def __init__(self, count, *, token=None, **config):
        self.token = token
        self.workers = [FakeWorker(f"w{i}") for i in range(count)]
        self.config = RouterConfig(**{"health_timeout_s": 1.0, "health_interval_s": 3600.0, **config})

    async def __aenter__(self):
        for worker in self.workers:
            await worker.start()
        self.router = Router(self.config, [w.url for w in self.workers], token=self.token)
        listener = listen("127.0.0.1", 0, option="router.port")
        self.url = url_of(listener)
        self.server = uvicorn.Server(uvicorn.Config(self.router.app(), log_level="error", lifespan="on"))
        self.task = asyncio.create_task(self.server.serve(sockets=[listener]))
        while not self.server.started:
            await asyncio.sleep(0.005)
        self.http = aiohttp.ClientSession(headers=headers(self.token))
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        self.server.should_exit = True
        await self.task
        for worker in self.workers:
            await worker.runner.cleanup()

    async def generate(self, key=None):
        headers = {ROUTING_KEY: key} if key else {}
        async with self.http.post(self.url + "/generate", data=b"{}", headers=headers) as reply:
            self.last = reply
            return reply.status, json.loads(await reply.read())

    async def post(self, path, body):
        async with self.http.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def states(self):
        async with self.http.get(self.url + "/router/workers") as reply:
            return [(w["state"], w["reason"]) for w in (await reply.json())["workers"]]


def run(scenario, count, **config):
    async def main():
        async with Setup(count, **config) as setup:
            return await scenario(setup)

    return asyncio.run(main())


def test_least_inflight_spreads_over_idle_workers_and_avoids_busy_ones():
    async def scenario(s):
        for worker in s.workers:
            worker.block = asyncio.Event()
        calls = [asyncio.create_task(s.generate()) for _ in range(9)]
        await asyncio.sleep(0.2)
        inflight = [w.inflight for w in s.router.workers]
        for worker in s.workers:
            worker.block.set()
        replies = await asyncio.gather(*calls)
        return inflight, [status for status, _ in replies], [w.inflight for w in s.router.workers]

    assert run(scenario, 3) == ([3, 3, 3], [200] * 9, [0, 0, 0])


def test_round_robin_takes_turns():
    async def scenario(s):
        return [(await s.generate())[1]["worker"] for _ in range(6)]

    assert run(scenario, 3, policy="round_robin") == ["w0", "w1", "w2"] * 2


def test_hop_headers_are_dropped_and_others_kept():
    async def scenario(s):
        await s.generate(key="abc")
        return s.last.headers, s.workers[0].headers

    back, there = run(scenario, 1)
    assert back["x-extra"] == "kept"
    assert back.get("server") != "secret"
    assert there.get(ROUTING_KEY.title()) == "abc" or there.get(ROUTING_KEY) == "abc"


def test_a_session_stays_with_its_worker_and_needs_its_key():
    async def scenario(s):
        seen = {}
        for key in [f"session-{i}" for i in range(12)] * 2:
            status, reply = await s.generate(key)
            assert status == 200
            assert seen.setdefault(key, reply["worker"]) == reply["worker"]
        return len(set(seen.values())), (await s.generate())[0]

    used, without_key = run(scenario, 3, policy="session")
    assert used > 1
    assert without_key == 400


@settings(max_examples=30)
@given(count=st.integers(2, 8), data=st.data())
def test_removing_a_worker_moves_only_its_own_sessions(count, data):
    workers = WorkerSet(RouterConfig(policy="session"), [f"http://w{i}" for i in range(count)])
    for worker in workers:
        workers.succeeded(worker, weight_version=0)
    keys = [f"k{i}" for i in range(60)]
    before = {key: workers.pick(key).url for key in keys}
    gone = f"http://w{data.draw(st.integers(0, count - 1))}"
    workers.remove(gone)
    after = {key: workers.pick(key).url for key in keys}
    assert all(after[k] == before[k] for k in keys if before[k] != gone)
    assert gone not in after.values()


def test_a_failing_worker_is_suspect_then_quarantined_and_needs_two_successes_to_return():
    async def scenario(s):
        history = []
        s.workers[0].sick = True
        for _ in range(3):
            await s.router.check_all()
            history.append((await s.states())[0])
        served = [(await s.generate())[1]["worker"] for _ in range(4)]
        s.workers[0].sick = False
        for _ in range(2):
            await s.router.check_all()
            history.append((await s.states())[0])
        return history, served

    history, served = run(scenario, 2, fail_threshold=3, recover_threshold=2)
    assert [h[0] for h in history] == ["suspect", "suspect", "quarantined", "quarantined", "healthy"]
    assert history[2][1] == "health_503"
    assert set(served) == {"w1"}


def test_a_stale_worker_stays_out_until_it_reports_the_required_version():
    async def scenario(s):
        s.workers[1].version = 6
        await s.post("/router/required_version", {"version": 6})
        stale = await s.states()
        served = {(await s.generate())[1]["worker"] for _ in range(4)}
        s.workers[0].version = 6
        await s.router.check_all()
        await s.router.check_all()
        return stale, served, await s.states()

    stale, served, later = run(scenario, 2)
    assert stale == [("quarantined", "stale_weights"), ("healthy", "")]
    assert served == {"w1"}
    assert later == [("healthy", ""), ("healthy", "")]


def test_a_worker_that_refuses_connections_is_replaced_without_the_caller_noticing():
    async def scenario(s):
        await s.workers[0].runner.cleanup()
        return [(await s.generate()) for _ in range(3)], (await s.states())[0][0]

    replies, state = run(scenario, 2)
    assert [r[1].get("worker") for r in replies] == ["w1"] * 3
    assert state in ("suspect", "quarantined")


def test_a_request_that_reached_a_worker_is_not_repeated():
    async def scenario(s):
        async def drop(request):
            await request.read()
            request.transport.abort()
            return web.Response()

        app = web.Application()
        app.router.add_post("/generate", drop)
        app.router.add_get("/health", s.workers[0]._health)
        app.router.add_get("/model_info", s.workers[0]._info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await s.post("/router/workers/remove", {"url": s.workers[0].url})
        await s.post("/router/workers", {"url": url})
        s.workers[1].block = asyncio.Event()
        held = asyncio.create_task(s.generate())  # keeps the good worker busier
        await asyncio.sleep(0.1)
        status, reply = await s.generate()
        s.workers[1].block.set()
        await held
        await runner.cleanup()
        return status, reply["message"], url, s.workers[1].served

    status, message, url, served = run(scenario, 2)
    assert status == 502
    assert url in message
    assert served == 1


def test_without_a_healthy_worker_the_caller_is_told_to_retry():
    async def scenario(s):
        for worker in s.workers:
            worker.sick = True
        for _ in range(3):
            await s.router.check_all()
        status, reply = await s.generate()
        async with s.http.get(s.url + "/health") as health:
            return status, s.last.headers["retry-after"], reply["message"], health.status

    status, retry, message, health = run(scenario, 2)
    assert (status, retry, health) == (503, "1", 503)
    assert "health_503" in message


def test_a_client_that_leaves_cancels_the_request_upstream():
    async def scenario(s):
        s.workers[0].block = asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.generate(), 0.2)
        for _ in range(100):
            if s.workers[0].cancelled:
                break
            await asyncio.sleep(0.02)
        return s.workers[0].cancelled, [w.inflight for w in s.router.workers]

    assert run(scenario, 1) == (1, [0])


def test_drain_waits_for_what_runs_and_lets_nothing_new_in():
    async def scenario(s):
        first = s.workers[0]
        first.block = asyncio.Event()
        running = asyncio.create_task(s.generate())
        await asyncio.sleep(0.1)
        drain = asyncio.create_task(s.post("/router/workers/drain", {"url": first.url}))
        await asyncio.sleep(0.1)
        assert not drain.done()
        assert (await s.generate())[1]["worker"] == "w1"
        first.block.set()
        assert (await running)[0] == 200
        status, worker = await asyncio.wait_for(drain, 5)
        return status, worker["inflight"], (await s.generate())[1]["worker"]

    assert run(scenario, 2) == (200, 0, "w1")


def test_a_new_worker_joins_after_one_good_check_and_an_old_one_after_the_threshold():
    workers = WorkerSet(RouterConfig(recover_threshold=2, fail_threshold=1), ["http://a"])
    (worker,) = workers
    assert workers.pick(None) is None
    workers.succeeded(worker, weight_version=1)
    assert worker.state == WorkerState.HEALTHY
    workers.failed(worker, "x")
    assert worker.state == WorkerState.QUARANTINED
    workers.succeeded(worker, weight_version=1)
    assert worker.state == WorkerState.QUARANTINED
    workers.succeeded(worker, weight_version=1)
    assert worker.state == WorkerState.HEALTHY
    workers.succeeded(worker, weight_version=1, weight_state="dirty")
    assert (worker.state, worker.reason) == (WorkerState.QUARANTINED, "weights_dirty")


def test_unknown_routes_and_workers_are_404():
    async def scenario(s):
        return [
            (await s.post("/router/workers/drain", {"url": "http://nobody"}))[0],
            (await s.post("/router/workers", {"address": 1}))[0],
            (await s.http.post(s.url + "/flush_cache")).status,
        ]

    assert run(scenario, 1) == [404, 400, 404]


def test_the_client_works_through_the_router_on_a_real_engine(engine_process):
    import numpy as np

    async def scenario(s):
        await s.post("/router/workers", {"url": engine_process.url})
        sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
        async with EngineClient(s.url, token=s.token) as client:
            request = GenerateRequest(np.array([2, 3]), sampling, seed=1, rid="x")
            through = await client.generate(request)
        async with EngineClient(engine_process.url, token=s.token) as client:
            return through, await client.generate(request)

    through, direct = run(scenario, 0, token=engine_process.token)
    assert through.tokens.tolist() == direct.tokens.tolist()
    assert through.log_probs.tolist() == direct.log_probs.tolist()


def test_a_router_with_a_token_answers_nobody_else():
    async def scenario(s):
        async with aiohttp.ClientSession() as stranger:
            open_ = (await stranger.get(s.url + "/health")).status
            closed = [
                (await stranger.get(s.url + "/router/workers")).status,
                (await stranger.post(s.url + "/generate", data=b"{}")).status,
                (await stranger.post(s.url + "/router/workers/remove", json={"url": s.workers[0].url})).status,
            ]
        return open_, closed, (await s.post("/generate", {}))[0]

    assert run(scenario, 1, token="t" * 40) == (200, [401, 401, 401], 200)


def test_a_worker_of_another_run_is_kept_out_whatever_its_version():
    workers = WorkerSet(RouterConfig(), ["http://a"])
    (worker,) = workers
    workers.required_version, workers.required_run = 3, "this run"
    workers.succeeded(worker, weight_version=100, run_id="an earlier run")
    assert (worker.state, worker.reason) == (WorkerState.QUARANTINED, "stale_weights")
    workers.succeeded(worker, weight_version=3, run_id="this run")
    assert worker.state == WorkerState.HEALTHY
    workers.succeeded(worker, weight_version=2, run_id="this run")
    assert worker.reason == "stale_weights"
    workers.succeeded(worker, weight_version=4, run_id="this run", weight_state="released")
    assert worker.reason == "weights_released"
