"""A generated MXFP4 checkpoint: several shards, scales in other shards, edge tiles, and a lossy tile on request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

Checkpoint = Callable[..., Path]


def mxfp4_weight(m: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (m, n // 2), dtype=torch.uint8, generator=g)
    packed[torch.rand(m, n // 2, generator=g) < 0.2] = 0x80
    return packed, torch.randint(116, 124, (m, n // 32), dtype=torch.uint8, generator=g)


@pytest.fixture
def mxfp4_checkpoint(tmp_path: Path) -> Checkpoint:
    def build(
        *, lossy: bool = False, layers: int = 3, experts: int = 1, m: int = 200, n: int = 160, name: str = "source"
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        shards: dict[str, dict[str, torch.Tensor]] = {f"model-{i}.safetensors": {} for i in range(layers)}
        files = list(shards)
        for layer in range(layers):
            for e, (expert, half) in enumerate(product(range(experts), ("gate_proj", "up_proj", "down_proj"))):
                packed, scale = mxfp4_weight(m, n, 10 * layer + e)
                if lossy and layer == 1 and half == "up_proj":
                    packed[150, 64:80] = 0x11  # 0.5 in the last block column ...
                    scale[150, 4] = 100  # ... 16 steps and more below its tile's largest code
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{half}."
                shards[files[layer]][stem + "weight"] = packed.view(torch.int8)
                shards[files[(layer + 1) % layers]][stem + "scale"] = scale.view(torch.float8_e8m0fnu)
            shards[files[layer]][f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(n).to(torch.bfloat16)
        shards[files[0]]["model.embed_tokens.weight"] = torch.randn(64, n).to(torch.bfloat16)
        for file, tensors in shards.items():
            save_file(tensors, directory / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": {t: f for f, ts in shards.items() for t in ts}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        config = {
            "model_type": "tiny",
            "num_hidden_layers": layers,
            "expert_dtype": "fp4",
            "text_config": {"expert_dtype": "fp4", "a": 1},
        }
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "tokenizer.json").write_text("{}")
        return directory

    return build


def fingerprint(directory: Path, *, without: tuple[str, ...] = ("report.json", "journal.jsonl")) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir()) if p.name not in without
    }


@pytest.fixture
def digest() -> Callable[..., dict[str, str]]:
    return fingerprint
