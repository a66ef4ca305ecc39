"""The engine HTTP contract on the embedded engine, and what the embedded engine promises beyond it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from contract import PROMPT, EngineContract, EngineUnderTest, body

from miles.rollout.access import headers
from miles.rollout.engine import EngineClient, GenerateRequest, SamplingParams
from miles_ci.declare import register_cpu_ci

register_cpu_ci(40, "stage-a-cpu", nightly=True)


class TestEmbeddedEngine(EngineContract):
    @pytest.fixture(scope="class")
    def engine(self, engine_process):
        return EngineUnderTest(engine_process.url, vocab_size=16, token=engine_process.token)

    def test_server_info_names_capabilities_and_the_probed_independence(self, http):
        info = http.get("/server_info").json()
        assert {"generate", "sampling_mask", "pause", "begin_end_weight_update"} <= set(info["capabilities"])
        assert info["batch_invariant"] is True
        assert info["eos_token_ids"] == [1]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"text": "hello"}, "text"),
            ({"stream": True}, "stream"),
            ({"input_ids": [3, 99]}, "99"),
            ({"input_ids": [3, True]}, "input_ids"),
            ({"input_ids": [[3], []]}, "input_ids"),
            ({"rid": ["a", "b"]}, "rid"),
            ({"lora_path": "x"}, "lora_path"),
            ({"sampling_params": {"frequency_penalty": 1.0}}, "frequency_penalty"),
            ({"sampling_params": {"top_p": 0}}, "top_p"),
            ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
            ({"sampling_params": {"max_new_tokens": 600}}, "context_length"),
            ({"sampling_params": {"n": 4}}, "sampling_seed"),
            ({"sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
        ],
    )
    def test_what_would_be_ignored_is_refused_by_name(self, http, change, named):
        reply = http.post("/generate", json={**body(), **change})
        assert reply.status_code == 422
        assert reply.json()["field"].split(".")[0] in (*change, "body")
        assert named in reply.json()["message"]

    def test_end_of_sequence_stops_unless_ignored(self, http):
        prompts = [[i, j] for i in range(2, 16) for j in range(2, 16)]
        params = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 3}
        replies = self.post(http, "/generate", {"input_ids": prompts, "sampling_params": params})
        kinds = {r["meta_info"]["finish_reason"]["type"] for r in replies}
        assert "stop" in kinds
        for reply in replies:
            ids = [p[1] for p in reply["meta_info"]["output_token_logprobs"]]
            stopped = reply["meta_info"]["finish_reason"]["type"] == "stop"
            assert ids.count(1) == (1 if stopped else 0)
            assert (ids[-1] == 1) == stopped

    def test_the_sampling_mask_holds_the_support_and_its_log_probs(self, engine):
        async def ask():
            async with EngineClient(engine.url, token=engine.token) as client:
                sampling = SamplingParams(max_new_tokens=8, top_p=0.7, top_k=6, ignore_eos=True)
                request = GenerateRequest(np.array(PROMPT), sampling, seed=2, rid="m", return_sampling_mask=True)
                return await client.generate(request)

        result = asyncio.run(ask())
        mask = result.sampling_mask
        assert len(mask) == 8
        assert max(np.diff(mask.offsets)) <= 6
        mask.require_tokens(result.tokens)
        # Renormalising over fewer tokens can only raise the log-prob.
        assert (result.support_log_probs >= result.log_probs - 1e-6).all()
        assert (result.support_log_probs <= 1e-6).all()

    def test_memory_released_while_idle_is_allocated_again(self, http):
        before = self.post(http, "/generate", body(temperature=0.0))
        assert self.post(http, "/release_memory_occupation", {"tags": ["kv_cache"]})["success"] is True
        self.post(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})
        after = self.post(http, "/generate", body(temperature=0.0))
        assert before["output_ids"] == after["output_ids"]

    def test_what_is_released_is_reported_as_not_held_and_comes_back_whole(self, http):
        held = self.post(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})["held"]
        assert held["kv_cache"] > 0
        assert held["weights"] > 0
        without = self.post(http, "/release_memory_occupation", {"tags": ["kv_cache"]})["held"]
        assert without == {"weights": held["weights"], "kv_cache": 0}
        assert self.post(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})["held"] == held

    def test_pause_mode_and_memory_tags_are_checked(self, http):
        assert http.post("/pause_generation", json={"mode": "now"}).json()["field"] == "mode"
        assert http.post("/release_memory_occupation", json={"tags": ["all"]}).json()["field"] == "tags"
        assert http.post("/abort_request", json={}).json()["field"] == "rid"


def test_health_generate_says_that_the_engine_is_paused(engine_process):
    with httpx.Client(base_url=engine_process.url, headers=headers(engine_process.token)) as http:
        http.post("/pause_generation", json={"mode": "in_place"})
        reply = http.get("/health_generate")
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "paused")
        assert http.get("/health").status_code == 200
        http.post("/continue_generation", json={})
        assert http.get("/health_generate").status_code == 200


def test_an_end_token_that_only_the_tokenizer_knows_ends_an_answer(tiny_model: Path, tmp_path: Path) -> None:
    from inprocess import LocalEngine

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    engine = LocalEngine(folder)
    try:
        params = [{"max_new_tokens": 60, "sampling_seed": seed, "temperature": 2.0} for seed in range(16)]
        outputs = engine.generate([[2, 3]] * 16, params)
    finally:
        engine.close()
    assert {output.finish["type"] for output in outputs if 1 in output.tokens} == {"stop"}
    assert all(output.tokens.index(1) == len(output.tokens) - 1 for output in outputs if 1 in output.tokens)
