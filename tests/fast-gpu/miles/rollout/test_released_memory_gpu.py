"""What an engine on a GPU releases is free for another process of the device."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from miles.rollout.access import headers
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=30, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["megatron"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOKENS = 4_000_000


def test_released_cache_and_weights_are_free_on_the_device(tmp_path: Path) -> None:
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.create import create_checkpoint
    from miles.rollout.config import EngineConfig
    from miles.rollout.engines.embedded.launch import launch

    build_char_tokenizer("0123456789=", tmp_path / "tokenizer")
    model = create_checkpoint(tmp_path / "model", tokenizer_dir=tmp_path / "tokenizer", seed=0)
    config = EngineConfig(device="cuda:0", max_total_tokens=TOKENS)
    with launch(config, model, log_path=tmp_path / "log") as engine:
        with httpx.Client(base_url=engine.url, headers=headers(engine.token), timeout=60) as http:

            def post(path: str, *tags: str) -> dict:
                reply = http.post(path, json={"tags": list(tags)})
                assert reply.status_code == 200, reply.text
                return reply.json()["held"]

            held = post("/resume_memory_occupation", "kv_cache")
            assert held["kv_cache"] > 1 << 30
            before = torch.cuda.mem_get_info()[0]
            assert post("/release_memory_occupation", "kv_cache", "weights") == {"weights": 0, "kv_cache": 0}
            assert torch.cuda.mem_get_info()[0] - before >= held["kv_cache"]
            assert post("/resume_memory_occupation", "weights", "kv_cache") == held
