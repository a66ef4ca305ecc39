"""Qwen3 dense: config.json -> megatron-core, and config.json of a new checkpoint.

Refuses attention biases (on the output projection too, which megatron-core cannot express beside a
bias-free MLP) and sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles.models.config import ModelShape
from miles.models.family import FamilyConfig, HFConfig
from miles.models.rope import RopeSpec
from miles.models.spellings import complete, stated_dtype

ARCHITECTURE = "Qwen3ForCausalLM"


def attention_fields(hf: HFConfig) -> dict[str, Any]:
    """The fields that dense and MoE share, checked."""
    hf.require("hidden_act", ("silu", "swish"), "only the gated SiLU MLP is built")
    hf.require("attention_bias", (False,), "attention projections carry no bias in this family")
    hf.require("attention_dropout", (0, 0.0), "dropout makes trainer and engine disagree")
    hf.require("use_sliding_window", (False, None), "sliding-window layers are not built")
    hf.require("per_layer_config", (None, {}), "layers of one model are built alike")
    layers = hf.integer("num_hidden_layers")
    hf.require("layer_types", (None, ["full_attention"] * layers), "every layer attends to all tokens")
    stated_dtype(hf.values, where=hf.where)
    return {
        "num_layers": layers,
        "hidden_size": hf.integer("hidden_size"),
        "ffn_hidden_size": hf.integer("intermediate_size"),
        "heads": hf.integer("num_attention_heads"),
        "groups": hf.integer("num_key_value_heads"),
        "head_dim": hf.integer("head_dim"),
        "vocab_size": hf.integer("vocab_size"),
        "max_positions": hf.integer("max_position_embeddings"),
        "norm_eps": hf.number("rms_norm_eps"),
        "tied": hf.boolean("tie_word_embeddings"),
    }


def to_mcore(hf: Mapping[str, Any], *, rope_kind: str | None = None, where: str = "config.json") -> FamilyConfig:
    """Shape of a Qwen3 checkpoint; `rope_kind` is the recipe's `rope.type`, if it states one."""
    fields = attention_fields(HFConfig(hf, where))
    return FamilyConfig(
        family="qwen3",
        rope=RopeSpec.from_hf(hf, head_dim=fields["head_dim"], expected_kind=rope_kind),
        transformer={"qk_layernorm": True},
        **fields,
    )


def hf_config(shape: ModelShape, vocab_size: int, special: Mapping[str, int | None]) -> dict[str, Any]:
    """config.json of a new Qwen3 checkpoint. `special`: bos/eos/pad token ids."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.groups,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": shape.tied,
        "dtype": shape.dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
        **{key: value for key, value in special.items() if value is not None},
    }


def attention_shapes(hf: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, "norm"|"weight") of one layer's norms and attention."""
    hidden, head_dim = hf["hidden_size"], hf["head_dim"]
    query, key_value = hf["num_attention_heads"] * head_dim, hf["num_key_value_heads"] * head_dim
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", (hidden,), "norm"
    yield prefix + "self_attn.q_proj.weight", (query, hidden), "weight"
    yield prefix + "self_attn.k_proj.weight", (key_value, hidden), "weight"
    yield prefix + "self_attn.v_proj.weight", (key_value, hidden), "weight"
    yield prefix + "self_attn.o_proj.weight", (hidden, query), "weight"
    yield prefix + "self_attn.q_norm.weight", (head_dim,), "norm"
    yield prefix + "self_attn.k_norm.weight", (head_dim,), "norm"
    yield prefix + "post_attention_layernorm.weight", (hidden,), "norm"


def mlp_shapes(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Shapes of one gated MLP below `prefix`."""
    yield prefix + "gate_proj.weight", (width, hidden), "weight"
    yield prefix + "up_proj.weight", (width, hidden), "weight"
    yield prefix + "down_proj.weight", (hidden, width), "weight"


def model_shapes(hf: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Shapes outside the layers."""
    yield "model.embed_tokens.weight", (hf["vocab_size"], hf["hidden_size"]), "weight"
    yield "model.norm.weight", (hf["hidden_size"],), "norm"
    if not hf["tie_word_embeddings"]:
        yield "lm_head.weight", (hf["vocab_size"], hf["hidden_size"]), "weight"


def shapes(hf: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Every tensor of a Qwen3 checkpoint."""
    hf = complete(hf)
    yield from model_shapes(hf)
    for layer in range(hf["num_hidden_layers"]):
        yield from attention_shapes(hf, layer)
        yield from mlp_shapes(f"model.layers.{layer}.mlp.", hf["hidden_size"], hf["intermediate_size"])
