"""The conformance suite of the engine HTTP contract. Subclass it and give an `engine` fixture (`EngineUnderTest`).

Written against the contract alone, so that it runs unchanged on the embedded engine and on an SGLang server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from miles.rollout.access import headers
from miles.rollout.engine import EngineClient, GenerateRequest, SamplingParams


@dataclass(frozen=True)
class EngineUnderTest:
    url: str
    vocab_size: int
    # Tokens that take long enough to be caught in the act.
    long_response: int = 400
    token: str | None = None
    seeded: bool = True
    eos: int = 1
    # Until a request surely runs, where the engine does not say how many tokens it has made.
    started_s: float = 0.08


PROMPT = [3, 5, 7, 9]


def body(**params):
    return {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True, **params},
        "return_logprob": True,
        "rid": "contract-1",
    }


class EngineContract:
    """Each test leaves the engine serving."""

    @pytest.fixture
    def http(self, engine):
        with httpx.Client(base_url=engine.url, timeout=60, headers=headers(engine.token)) as client:
            yield client

    def post(self, http, path, json=None):
        reply = http.post(path, json={} if json is None else json)
        assert reply.status_code == 200, reply.text
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None

    def check_reply(self, engine, reply, *, prompt=PROMPT, most=6):
        meta = reply["meta_info"]
        pairs = meta["output_token_logprobs"]
        assert meta["prompt_tokens"] == len(prompt)
        assert len(pairs) == meta["completion_tokens"] <= most
        for log_prob, token, *_ in pairs:
            assert np.isfinite(log_prob)
            assert log_prob <= 1e-6
            assert 0 <= token < engine.vocab_size
        assert meta["finish_reason"]["type"] in ("stop", "length", "abort")
        assert meta["weight_version"].isdecimal()
        assert 0 <= meta["cached_tokens"] <= len(prompt)

    def test_one_request_is_answered_with_one_object(self, engine, http):
        reply = self.post(http, "/generate", body())
        self.check_reply(engine, reply)
        assert reply["meta_info"]["id"] == "contract-1"
        assert reply["meta_info"]["completion_tokens"] == 6
        assert reply["meta_info"]["finish_reason"]["type"] == "length"

    def test_lists_are_answered_with_a_list_in_order(self, engine, http):
        prompts = [[3], [5, 6, 7], [9, 2]]
        params = [{"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True} for n in (2, 5, 3)]
        rids = ["a", "b", "c"]
        sent = {"input_ids": prompts, "sampling_params": params, "rid": rids, "return_logprob": True}
        replies = self.post(http, "/generate", sent)
        assert [r["meta_info"]["id"] for r in replies] == rids
        assert [r["meta_info"]["completion_tokens"] for r in replies] == [2, 5, 3]
        for prompt, reply in zip(prompts, replies, strict=True):
            self.check_reply(engine, reply, prompt=prompt)

    def test_a_stop_token_ends_the_response_and_is_part_of_it(self, engine, http):
        free = self.post(http, "/generate", body(temperature=0.0, max_new_tokens=20))
        tokens = [pair[1] for pair in free["meta_info"]["output_token_logprobs"]]
        stop = next(token for token in tokens[3:] if token != engine.eos)
        # With the end of a text among the reasons: what ignore_eos does to other stop tokens is not in the contract.
        end = min(tokens.index(token) for token in (stop, engine.eos) if token in tokens)
        asked = body(temperature=0.0, max_new_tokens=20, stop_token_ids=[stop], ignore_eos=False)
        reply = self.post(http, "/generate", asked)
        got = [pair[1] for pair in reply["meta_info"]["output_token_logprobs"]]
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"
        assert got == tokens[: end + 1]

    def test_greedy_repeats_itself(self, engine, http):
        replies = [self.post(http, "/generate", body(temperature=0.0))["meta_info"] for _ in range(2)]
        assert replies[0]["output_token_logprobs"] == replies[1]["output_token_logprobs"]

    def test_a_seed_repeats_the_draws_and_another_seed_does_not(self, engine, http):
        if not engine.seeded:
            pytest.skip("this engine was started without deterministic sampling")
        draws = [
            [p[1] for p in self.post(http, "/generate", body(sampling_seed=seed, max_new_tokens=24))["meta_info"]["output_token_logprobs"]]
            for seed in (11, 11, 12)
        ]  # fmt: skip
        assert draws[0] == draws[1] != draws[2]

    def test_top_k_one_equals_greedy(self, engine, http):
        greedy = self.post(http, "/generate", body(temperature=0.0))["meta_info"]["output_token_logprobs"]
        top = self.post(http, "/generate", body(top_k=1))["meta_info"]["output_token_logprobs"]
        assert [p[1] for p in greedy] == [p[1] for p in top]

    def test_information_routes(self, engine, http):
        assert http.get("/health").status_code == 200
        assert http.get("/health_generate").status_code == 200
        model = http.get("/model_info").json()
        assert model["model_path"]
        assert model["weight_version"].isdecimal()
        assert http.get("/server_info").status_code == 200

    def test_bad_requests_are_refused(self, http):
        for bad in ({**body(), "input_ids": []}, body(temperature=-1.0), body(max_new_tokens=10**7)):
            assert http.post("/generate", json=bad).status_code in (400, 422), bad
        assert http.post("/generate", content=b"{").status_code in (400, 422)

    def test_abort_of_an_unknown_request_is_no_error(self, http):
        self.post(http, "/abort_request", {"rid": "never-seen"})

    def running(self, engine, http, count=1):
        """A long generate call in a thread, already producing."""
        result = {}
        before = (http.get("/server_info").json().get("load") or {}).get("tokens_generated")
        params = {"max_new_tokens": engine.long_response, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 5}
        sent = {"input_ids": [PROMPT] * count, "sampling_params": [params] * count, "return_logprob": True}
        sent["rid"] = [f"long-{i}" for i in range(count)]

        def call():
            with httpx.Client(base_url=engine.url, timeout=120, headers=headers(engine.token)) as client:
                result["reply"] = client.post("/generate", json=sent).json()

        thread = threading.Thread(target=call)
        thread.start()
        deadline = time.monotonic() + 30
        while (load := http.get("/server_info").json().get("load")) is not None and load["tokens_generated"] == before:
            assert thread.is_alive(), result
            assert time.monotonic() < deadline, "the request did not start"
            time.sleep(0.005)
        if load is None:
            time.sleep(engine.started_s)
        return thread, result

    def test_abort_returns_what_was_produced(self, engine, http):
        thread, result = self.running(engine, http, 2)
        self.post(http, "/abort_request", {"abort_all": True})
        thread.join(30)
        for reply in result["reply"]:
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
            self.check_reply(engine, reply, most=engine.long_response)
            assert 0 < reply["meta_info"]["completion_tokens"] < engine.long_response

    def test_pause_with_abort_returns_partial_output_and_later_requests_wait(self, engine, http):
        thread, result = self.running(engine, http)
        self.post(http, "/pause_generation", {"mode": "abort"})
        thread.join(30)
        assert result["reply"][0]["meta_info"]["finish_reason"]["type"] == "abort"
        self.check_waits_until_continued(engine, http)

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    def test_paused_requests_finish_after_continue(self, engine, http, mode):
        whole = self.running(engine, http)
        whole[0].join(60)
        thread, result = self.running(engine, http)
        self.post(http, "/pause_generation", {"mode": mode})
        self.post(http, "/pause_generation", {"mode": mode})  # idempotent
        thread.join(0.3)
        assert thread.is_alive()
        self.post(http, "/continue_generation")
        thread.join(60)
        meta = result["reply"][0]["meta_info"]
        assert meta["completion_tokens"] == engine.long_response
        assert meta["finish_reason"]["type"] == "length"
        if engine.seeded:
            assert meta["output_token_logprobs"] == whole[1]["reply"][0]["meta_info"]["output_token_logprobs"]

    def check_waits_until_continued(self, engine, http):
        result = {}

        def call():
            with httpx.Client(base_url=engine.url, timeout=60, headers=headers(engine.token)) as client:
                result["reply"] = client.post("/generate", json=body())

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "a request that arrives while paused waits"
        self.post(http, "/continue_generation")
        thread.join(30)
        assert result["reply"].status_code == 200

    def test_flush_is_refused_while_requests_run_and_works_when_idle(self, engine, http):
        thread, _ = self.running(engine, http)
        assert http.post("/flush_cache").status_code == 400
        self.post(http, "/abort_request", {"abort_all": True})
        thread.join(30)
        assert http.post("/flush_cache").status_code == 200

    def test_a_closed_connection_ends_its_requests(self, engine, http):
        client = httpx.Client(base_url=engine.url, timeout=0.15, headers=headers(engine.token))
        with client, pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json=body(max_new_tokens=engine.long_response))
        deadline = time.monotonic() + 10
        while http.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "the request of a closed connection still runs"
            time.sleep(0.05)

    def test_the_client_reads_what_the_engine_writes(self, engine):
        async def ask():
            async with EngineClient(engine.url, token=engine.token, vocab_size=engine.vocab_size) as client:
                sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
                requests = [GenerateRequest(np.array(PROMPT), sampling, seed=i, rid=f"r{i}") for i in range(6)]
                return await asyncio.gather(*(client.generate(r) for r in requests)), await client.weight_version()

        results, version = asyncio.run(ask())
        assert [r.rid for r in results] == [f"r{i}" for i in range(6)]
        for result in results:
            assert result.tokens.dtype == np.int64
            assert result.log_probs.dtype == np.float32
            assert len(result.tokens) == len(result.log_probs) == 5
            assert result.version_spans.tolist() == [[version, 5]]
