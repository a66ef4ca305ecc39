"""Qwen3-MoE: what its config means, which names it has, what of it is quantised, and how its router chooses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from miles.models import registry
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.models.errors import ModelError
from miles.models.hf_files import HFCheckpoint
from miles.models.qwen3_moe import chat, config
from miles.models.qwen3_moe.weights import FAMILY
from miles.quant.scope import is_routed_expert_weight

# The shape of Qwen3-30B-A3B.
LARGE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    shape = ModelShape(hidden_size=32, head_dim=8, init_std=0.2, num_experts=6, experts_per_token=2)
    target = tmp_path_factory.mktemp("moe") / "model"
    return create_checkpoint(target, family="qwen3_moe", shape=shape, tokenizer_dir=tokenizer_dir, seed=0)


def test_the_published_shape_has_thirty_billion_parameters_three_of_them_active() -> None:
    total = expert = 0
    for name, shape, _ in FAMILY.shapes(LARGE):
        total += math.prod(shape)
        expert += math.prod(shape) if is_routed_expert_weight(name) else 0
    assert total == pytest.approx(30.5e9, rel=0.01)
    assert total - expert + expert * 8 / 128 == pytest.approx(3.3e9, rel=0.03)


def test_the_config_becomes_core_options() -> None:
    model = FAMILY.to_mcore(LARGE)
    assert (model.num_layers, model.heads, model.groups, model.head_dim) == (48, 32, 4, 128)
    assert (model.num_experts, model.experts_per_token) == (128, 8)
    assert model.transformer["moe_ffn_hidden_size"] == 768
    assert model.transformer["qk_layernorm"] is True
    assert model.transformer["moe_router_load_balancing_type"] == "none"
    assert model.transformer["moe_router_pre_softmax"] is False
    assert FAMILY.to_mcore({**LARGE, "norm_topk_prob": False}).transformer["moe_router_pre_softmax"] is True


def test_inv_freq_golden() -> None:
    frequencies = FAMILY.to_mcore(LARGE).rope.inv_freq()
    assert len(frequencies) == 64
    for pair, expected in {0: 1.0, 1: 0.805842188, 32: 1e-3, 63: 1.24093776e-6}.items():
        assert frequencies[pair].item() == pytest.approx(expected, rel=1e-6), pair


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step.*every layer must be routed"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers.*every layer must be routed"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_options_that_are_not_built_are_refused(change: dict, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        FAMILY.to_mcore({**LARGE, **change})


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"])
def test_nothing_that_the_checkpoint_states_is_defaulted(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        FAMILY.to_mcore({k: v for k, v in LARGE.items() if k != key})


def test_a_created_model_is_tiny_resolved_and_fully_mapped(moe_dir: Path) -> None:
    hf = json.loads((moe_dir / "config.json").read_text())
    family = registry.resolve(hf)
    assert family is FAMILY
    names = list(HFCheckpoint(moe_dir).names())
    assert set(names) == {name for name, _, _ in config.shapes(hf)}
    assert sum(math.prod(shape) for _, shape, _ in config.shapes(hf)) <= 2_000_000
    family.weights.bind(family.to_mcore(hf).map_shape).check_hf_coverage(names, where="here")


def test_the_scope_is_every_expert_weight_in_both_namings(moe_dir: Path) -> None:
    hf = json.loads((moe_dir / "config.json").read_text())
    bound = FAMILY.weights.bind(FAMILY.to_mcore(hf).map_shape)
    for mcore, entry in bound.entries.items():
        routed = ".experts." in mcore
        assert is_routed_expert_weight(mcore) is routed
        assert [is_routed_expert_weight(name) for name in entry.hf] == [routed] * len(entry.hf)
    assert sum(map(is_routed_expert_weight, bound.expected_hf)) == 2 * 6 * 3


@pytest.mark.parametrize("normalise", [True, False])
def test_router_and_experts_of_the_engine_equal_transformers(normalise: bool, moe_dir: Path) -> None:
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from miles.rollout.engines.embedded.models.qwen3_moe import Qwen3MoeShape, RoutedExperts
    from miles.rollout.engines.embedded.models.storage import ParameterStore

    hf = json.loads((moe_dir / "config.json").read_text()) | {"norm_topk_prob": normalise}
    weights = {n: t for n, t in load_file(moe_dir / "model.safetensors").items() if n.startswith("model.layers.1.mlp.")}
    store = ParameterStore(torch.float32, torch.device("cpu"))
    ours = RoutedExperts(store, "model.layers.1.mlp", Qwen3MoeShape.from_config(hf))
    for name, tensor in weights.items():
        store.by_name[name].copy_(tensor)
    theirs = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**{k: v for k, v in hf.items() if k != "architectures"}))
    plain = {n.removeprefix("model.layers.1.mlp."): t for n, t in weights.items()}
    packed = {
        "gate.weight": plain["gate.weight"],
        "experts.gate_up_proj": torch.stack(
            [torch.cat([plain[f"experts.{e}.{h}_proj.weight"] for h in ("gate", "up")]) for e in range(6)]
        ),
        "experts.down_proj": torch.stack([plain[f"experts.{e}.down_proj.weight"] for e in range(6)]),
    }
    theirs.load_state_dict(packed)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = theirs(x[None])
        expected = found[0] if isinstance(found, tuple) else found
        assert (ours(x) - expected.reshape(20, 32)).abs().max() <= 1e-5


def test_the_chat_format_is_that_of_the_dense_family() -> None:
    assert registry.chat_format("qwen3_moe") == registry.chat_format("qwen3")
    assert chat.FORMAT.turn_end == chat.TURN_END
    assert all(mark in chat.FORMAT.template for mark in (chat.TURN_START, chat.TURN_END, *chat.TOOL_CALL))
