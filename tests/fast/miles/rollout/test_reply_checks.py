"""Every reply is checked: what breaks the contract is an error that names engine, request and value."""

from __future__ import annotations

import asyncio
import copy
import json

import numpy as np
import pytest
from aiohttp import web

from miles.rollout.engine import EngineClient, GenerateRequest, SamplingParams
from miles.rollout.errors import (
    EngineCapabilityError,
    EngineHttpError,
    EngineReplyError,
    EngineUnreachable,
)
from miles.rollout.messages import read_replies

REQUEST = GenerateRequest(np.array([3, 4]), SamplingParams(max_new_tokens=3), seed=1, rid="r")
GOOD = {
    "text": "",
    "meta_info": {
        "id": "r",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "7",
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 3, None], [-1.0, 1, None]],
    },
}


def read(reply, request=REQUEST):
    return read_replies([reply], [request], vocab_size=16, engine="http://e")[0]


def test_a_good_reply_becomes_arrays():
    result = read(GOOD)
    assert result.tokens.tolist() == [3, 1]
    assert result.log_probs.tolist() == [-0.5, -1.0]
    assert (result.finish_reason, result.weight_version) == ("stop", 7)
    assert result.version_spans.tolist() == [[7, 2]]


def test_an_aborted_reply_without_tokens_is_good():
    reply = copy.deepcopy(GOOD)
    reply["meta_info"].update(completion_tokens=0, output_token_logprobs=[], finish_reason={"type": "abort"})
    assert read(reply).version_spans.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"completion_tokens": 3}, "completion_tokens"),
        ({"completion_tokens": None}, "completion_tokens"),
        ({"output_token_logprobs": None}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-0.5, 3, None], [None, 1, None]]}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-0.5, 3, None], [0.01, 1, None]]}, r"output_token_logprobs\[1\].*0.01"),
        ({"output_token_logprobs": [[-0.5, 3, None], [float("-inf"), 1, None]]}, "inf"),
        ({"output_token_logprobs": [[float("nan"), 3, None], [-1.0, 1, None]]}, r"\[0\].*nan"),
        ({"output_token_logprobs": [[-0.5, 16, None], [-1.0, 1, None]]}, "id 16"),
        ({"output_token_logprobs": [[-0.5, -1, None], [-1.0, 1, None]]}, "id -1"),
        ({"output_token_logprobs": [[-0.5, 3.0, None], [-1.0, 1, None]]}, "3.0"),
        ({"output_token_logprobs": [[-0.5, True, None], [-1.0, 1, None]]}, "True"),
        ({"output_token_logprobs": [[-0.5], [-1.0, 1, None]]}, r"\[0\]"),
        ({"finish_reason": {"type": "pending"}}, "pending"),
        ({"finish_reason": None}, "finish_reason"),
        ({"weight_version": 7}, "weight_version"),
        ({"weight_version": "default"}, "default"),
        ({"weight_version": "1" * 5000}, "weight_version"),
        ({"weight_version": "9" * 19}, "weight_version"),
        ({"weight_version": "\u0667"}, "weight_version"),
        ({"weight_version_spans": [["1" * 5000, 1]]}, "add up"),
        ({"weight_version_spans": [["9" * 30, 1]]}, "add up"),
        ({"weight_version_spans": [["6", 1]]}, "add up"),
        ({"id": "other"}, "other"),
        ({"prompt_tokens": 3}, "prompt_tokens"),
        ({"completion_tokens": 0, "output_token_logprobs": []}, "no token"),
        ({"completion_tokens": 4, "output_token_logprobs": [[-0.5, 3, None]] * 4}, "4 tokens"),
    ],
)
def test_a_broken_reply_is_refused(change, named):
    reply = copy.deepcopy(GOOD)
    reply["meta_info"].update(change)
    with pytest.raises(EngineReplyError, match=named) as raised:
        read(reply)
    assert "http://e" in str(raised.value)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        {"ids": [3, 1], "offsets": [0, 1]},
        {"ids": [3, 2], "offsets": [0, 1, 2], "logprobs": [0.0, 0.0]},
        {"ids": [3, 1], "offsets": [0, 1, 2], "logprobs": [-1.0, 0.0]},
        {"ids": [3, 3, 1], "offsets": [0, 2, 3]},
        {"ids": [3.0, 1.0], "offsets": [0, 1, 2]},
        {"ids": [3, 1], "offsets": [0, 1, 2, 2]},
        {"ids": [3, 1, 5], "offsets": [0, 1, 2]},
        {"ids": [3, 1], "offsets": [1, 1, 2]},
        {"ids": [3, 1], "offsets": []},
    ],
)
def test_a_broken_sampling_mask_is_refused(mask):
    request = GenerateRequest(**{**{f: getattr(REQUEST, f) for f in REQUEST.__slots__}, "return_sampling_mask": True})
    reply = copy.deepcopy(GOOD)
    reply["meta_info"]["output_sampling_mask"] = mask
    with pytest.raises(EngineReplyError, match="output_sampling_mask"):
        read(reply, request)
    reply["meta_info"]["output_sampling_mask"] = {"ids": [3, 1], "offsets": [0, 1, 2], "logprobs": [0.0, 0.0]}
    assert read(reply, request).support_log_probs.tolist() == [0.0, 0.0]


def test_one_broken_mask_among_others_is_named():
    good = {"ids": [3, 1], "offsets": [0, 1, 2], "logprobs": [0.0, 0.0]}
    wanted = {f: getattr(REQUEST, f) for f in REQUEST.__slots__} | {"return_sampling_mask": True}
    requests, replies = [], []
    for number in range(3):
        requests.append(GenerateRequest(**{**wanted, "rid": f"r{number}"}))
        reply = copy.deepcopy(GOOD)
        reply["meta_info"] |= {"id": f"r{number}", "output_sampling_mask": copy.deepcopy(good)}
        replies.append(reply)
    masks = [r.sampling_mask for r in read_replies(replies, requests, vocab_size=8, engine="e")]
    assert [mask.ids.tolist() for mask in masks] == [[3, 1]] * 3
    replies[2]["meta_info"]["output_sampling_mask"].pop("logprobs")
    mixed = read_replies(replies, requests, vocab_size=8, engine="e")
    assert [r.sampling_mask.log_probs is None for r in mixed] == [False, False, True]
    # Offsets that would fit if they were read across the replies' borders.
    replies[0]["meta_info"]["output_sampling_mask"]["offsets"] = [0, 1, 3]
    with pytest.raises(EngineReplyError, match=r"request r0: output_sampling_mask: .*last offset is 3"):
        read_replies(replies, requests, vocab_size=8, engine="e")


def test_mixed_batches_name_the_request_at_fault():
    second = GenerateRequest(REQUEST.input_ids, REQUEST.sampling, seed=1, rid="second")
    bad = copy.deepcopy(GOOD)
    bad["meta_info"].update(id="second", output_token_logprobs=[[-0.5, 3, None], [-1.0, 99, None]])
    with pytest.raises(EngineReplyError, match=r"request second: output_token_logprobs\[1\].*99"):
        read_replies([GOOD, bad], [REQUEST, second], vocab_size=16, engine="e")
    with pytest.raises(EngineReplyError, match="1 for 2 requests"):
        read_replies([GOOD], [REQUEST, second], vocab_size=16, engine="e")


class FakeServer:
    """A real HTTP server on a free port; `answer(body)` gives status and JSON of /generate."""

    def __init__(self, answer, *, info=None, openapi=None):
        self.answer = answer
        self.info = {"engine": "fake", "version": "9", "capabilities": ["generate"], "vocab_size": 16, **(info or {})}
        self.openapi = openapi
        self.bodies = []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/openapi.json", self._openapi)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def _generate(self, request):
        self.bodies.append(await request.json())
        answer = self.answer(self.bodies[-1])
        if asyncio.iscoroutine(answer):
            answer = await answer
        return web.Response(status=answer[0], text=json.dumps(answer[1]))

    async def _info(self, request):
        return web.json_response(self.info)

    async def _openapi(self, request):
        return web.json_response(self.openapi)


def echo(sent):
    replies = []
    for rid, ids in zip(sent["rid"], sent["input_ids"], strict=True):
        meta = {**GOOD["meta_info"], "id": rid, "prompt_tokens": len(ids)}
        replies.append({"meta_info": meta})
    return 200, replies


def requests(n, **changes):
    fields = {f: getattr(REQUEST, f) for f in REQUEST.__slots__}
    return [GenerateRequest(**{**fields, "rid": f"r{i}", **changes}) for i in range(n)]


def with_client(server, use, **options):
    async def run():
        async with server, EngineClient(server.url, **options) as client:
            return await use(client)

    return asyncio.run(run())


def test_calls_of_one_tick_travel_as_one_request():
    server = FakeServer(echo)

    async def use(client):
        await client.info()
        return await asyncio.gather(*(client.generate(r) for r in requests(50)))

    results = with_client(server, use)
    assert [r.rid for r in results] == [f"r{i}" for i in range(50)]
    assert len(server.bodies) == 1
    assert server.bodies[0]["sampling_params"][0] == {"max_new_tokens": 3, "temperature": 1.0, "sampling_seed": 1}


def test_batch_keys_and_size_split_the_calls(monkeypatch):
    monkeypatch.setattr("miles.rollout.engine.MAX_BATCH", 8)
    server = FakeServer(echo)

    async def use(client):
        await client.info()
        calls = [client.generate_many(requests(4, batch_key=key)) for key in (1, 1, 1, 2)]
        return await asyncio.gather(*calls)

    with_client(server, use)
    assert sorted(len(b["rid"]) for b in server.bodies) == [4, 4, 8]


def test_an_http_error_carries_status_and_kind():
    error = {"error": {"type": "weights_dirty", "message": "sync first"}}
    with pytest.raises(EngineHttpError, match="503 weights_dirty: sync first") as raised:
        with_client(FakeServer(lambda _: (503, error)), lambda c: c.generate(REQUEST))
    assert (raised.value.status, raised.value.kind) == (503, "weights_dirty")


def test_success_false_is_an_error_even_with_status_200():
    with pytest.raises(EngineHttpError, match="no memory"):
        with_client(
            FakeServer(lambda _: (200, {"success": False, "message": "no memory"})), lambda c: c.generate(REQUEST)
        )


def test_a_slow_engine_is_given_up_after_the_time_limit():
    async def answer(_):
        await asyncio.sleep(5)
        return 200, []

    with pytest.raises(EngineUnreachable, match=r"within 0\.2 s"):
        with_client(FakeServer(answer), lambda c: c.generate(REQUEST), timeout_s=0.2)


def test_an_absent_engine_is_unreachable():
    async def run():
        async with EngineClient("http://127.0.0.1:9", vocab_size=4) as client:
            await client.info()

    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9"):
        asyncio.run(run())


def test_an_absent_capability_is_refused_before_a_request_is_sent():
    server = FakeServer(
        echo, info={"capabilities": None}, openapi={"paths": {"/generate": {}, "/pause_generation": {}}}
    )
    with pytest.raises(EngineCapabilityError, match="sampling_mask"):
        with_client(server, lambda c: c.generate_many(requests(1, return_sampling_mask=True)))
    assert server.bodies == []


def test_cancelling_the_callers_closes_the_connection():
    async def answer(_):
        await asyncio.sleep(30)

    async def use(client):
        await client.info()
        tasks = [asyncio.create_task(client.generate(r)) for r in requests(3)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(50):
            if not client._tasks:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the batch still runs")

    with_client(FakeServer(answer), use)
