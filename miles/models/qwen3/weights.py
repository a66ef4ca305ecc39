"""Qwen3 dense: Hugging Face names <-> megatron-core parameters."""

from __future__ import annotations

from miles.models.family import Family
from miles.models.qwen3 import config
from miles.models.weightmap import QKV, AtomicGroup, GateUp, Rule, Tied, WeightMap, direct

HF_LAYER = "model.layers.{layer}."
MCORE_LAYER = "decoder.layers.{layer}."

MODEL_RULES: tuple[Rule, ...] = (
    direct("model.embed_tokens.weight", "embedding.word_embeddings.weight", axis=0, pad_vocab=True),
    direct("model.norm.weight", "decoder.final_layernorm.weight"),
    direct("lm_head.weight", "output_layer.weight", axis=0, pad_vocab=True, when=lambda shape: not shape.tied),
)
ATTENTION_RULES: tuple[Rule, ...] = (
    direct(HF_LAYER + "input_layernorm.weight", MCORE_LAYER + "input_layernorm.weight"),
    QKV(
        mcore=MCORE_LAYER + "self_attention.linear_qkv.weight",
        hf=tuple(HF_LAYER + f"self_attn.{name}_proj.weight" for name in "qkv"),
    ),
    direct(HF_LAYER + "self_attn.q_norm.weight", MCORE_LAYER + "self_attention.q_layernorm.weight"),
    direct(HF_LAYER + "self_attn.k_norm.weight", MCORE_LAYER + "self_attention.k_layernorm.weight"),
    direct(HF_LAYER + "self_attn.o_proj.weight", MCORE_LAYER + "self_attention.linear_proj.weight", axis=1),
    direct(HF_LAYER + "post_attention_layernorm.weight", MCORE_LAYER + "pre_mlp_layernorm.weight"),
)
MLP_RULES: tuple[Rule, ...] = (
    GateUp(
        mcore=MCORE_LAYER + "mlp.linear_fc1.weight",
        hf=(HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight"),
    ),
    direct(HF_LAYER + "mlp.down_proj.weight", MCORE_LAYER + "mlp.linear_fc2.weight", axis=1),
)
TIED = (Tied(hf="lm_head.weight", source="model.embed_tokens.weight"),)
ATOMIC = (
    AtomicGroup("qkv", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
    AtomicGroup("gate_up", ("gate_proj.weight", "up_proj.weight")),
)

MAP = WeightMap(rules=MODEL_RULES + ATTENTION_RULES + MLP_RULES, tied=TIED, atomic=ATOMIC)

FAMILY = Family(
    name="qwen3",
    architectures=(config.ARCHITECTURE,),
    to_mcore=config.to_mcore,
    weights=MAP,
    shapes=config.shapes,
    hf_config=config.hf_config,
)
