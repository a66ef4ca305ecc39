"""The engine HTTP contract on a real SGLang server, unchanged, and weight updates through its own routes."""

from __future__ import annotations

import math

import pytest
import torch
from contract import PROMPT, EngineContract, EngineUnderTest, body
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles.sync.config import SyncConfig
from miles.sync.errors import NoEngineLeft
from miles.sync.session import WeightPusher
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=120, suite="stage-b-cpu", labels=["sglang"], nightly=True, serial=True, timeout=1500)

SYNC = SyncConfig(timeout_s=30.0, bucket_bytes=65536)


class TestSGLang(EngineContract):
    @pytest.fixture(scope="class")
    def engine(self, server):
        # No attention kernel of a CPU build is deterministic in SGLang's sense, and without it seeds do not act.
        return EngineUnderTest(server.url, vocab_size=16, seeded=False, started_s=0.3)


@pytest.fixture(scope="module")
def pushed(server, small_model):
    """Other weights of the same model, and the report of their push as version 1."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: value + 0.05 * torch.randn(value.shape, generator=generator)
        for name, value in load_file(small_model / "model.safetensors").items()
    }
    with WeightPusher([server.url], SYNC, "run", engine="sglang") as pusher:
        yield weights, pusher, pusher.push(list(weights.items()), 1)


class TestWeights(EngineContract):
    """After an update the contract holds as before, with the new weights."""

    @pytest.fixture(scope="class")
    def engine(self, server, pushed):
        return EngineUnderTest(server.url, vocab_size=16, seeded=False, started_s=0.3)

    def test_the_update_went_in_several_checked_buckets(self, server, pushed):
        _, _, report = pushed
        assert report.engines == {server.url: "serving"}
        assert report.buckets > 1
        assert report.checksummed

    def test_log_probs_are_those_of_the_pushed_weights(self, engine, http, pushed, small_model):
        weights, _, _ = pushed
        meta = self.post(http, "/generate", body(temperature=0.0))["meta_info"]
        assert meta["weight_version"] == "1"
        model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
        model.load_state_dict(weights)
        ids = [pair[1] for pair in meta["output_token_logprobs"]]
        with torch.no_grad():
            scores = model(torch.tensor([PROMPT + ids])).logits.log_softmax(-1)[0]
        expected = [float(scores[len(PROMPT) - 1 + at, token]) for at, token in enumerate(ids)]
        for (found, _, *_), wanted in zip(meta["output_token_logprobs"], expected, strict=True):
            assert math.isclose(found, wanted, abs_tol=1e-4)

    def test_nothing_cached_of_older_weights_is_used(self, http, pushed):
        weights, pusher, _ = pushed
        for _ in range(2):
            cached = self.post(http, "/generate", body())["meta_info"]["cached_tokens"]
        assert cached > 0
        pusher.push(list(weights.items()), pusher.version + 1)
        assert self.post(http, "/generate", body())["meta_info"]["cached_tokens"] == 0

    def test_running_requests_are_put_back_and_say_which_versions_drew_them(self, engine, http, pushed):
        weights, pusher, _ = pushed
        before = pusher.version
        thread, result = self.running(engine, http)
        pusher.push(list(weights.items()), before + 1)
        thread.join(60)
        meta = result["reply"][0]["meta_info"]
        assert meta["completion_tokens"] == engine.long_response
        assert [span["version"] for span in meta["weight_versions"]] == [str(before), str(before + 1)]


def test_a_missing_weight_leaves_the_server_paused_until_a_whole_update(server, pushed):
    """Runs last: a server with half an update answers nobody."""
    import httpx

    weights, pusher, _ = pushed
    version = pusher.version
    some = {name: value for name, value in weights.items() if "layers.1.mlp.down_proj" not in name}
    with WeightPusher([server.url], SYNC, "lacking", engine="sglang") as lacking:
        with pytest.raises(NoEngineLeft, match=r"layers\.1\.mlp\.down_proj\.weight 0 of \d+"):
            lacking.push(list(some.items()), version + 1)
    with httpx.Client(base_url=server.url, timeout=1.0) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/generate", json=body())
        assert http.get("/model_info").json()["weight_version"] == str(version)
    with WeightPusher([server.url], SYNC, "healer", engine="sglang") as healer:
        assert healer.push(list(weights.items()), version + 2).engines == {server.url: "serving"}
    with httpx.Client(base_url=server.url, timeout=30.0) as http:
        # Another id: the request that nobody waits for any more may still be known.
        reply = http.post("/generate", json={**body(), "rid": "healed"}).json()
        assert reply["meta_info"]["weight_version"] == str(version + 2), reply
