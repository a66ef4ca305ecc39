"""Qwen3-MoE: config.json -> megatron-core, and config.json of a new checkpoint.

Refuses dense layers between the routed ones. The router's auxiliary loss is off: its coefficient in the
checkpoint belongs to pre-training and would move the policy away from the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles.models.config import ModelShape
from miles.models.family import FamilyConfig, HFConfig
from miles.models.qwen3 import config as dense
from miles.models.rope import RopeSpec
from miles.models.spellings import complete

ARCHITECTURE = "Qwen3MoeForCausalLM"


def to_mcore(hf: Mapping[str, Any], *, rope_kind: str | None = None, where: str = "config.json") -> FamilyConfig:
    """Shape of a Qwen3-MoE checkpoint; `rope_kind` is the recipe's `rope.type`, if it states one."""
    values = HFConfig(hf, where)
    values.require("decoder_sparse_step", (1,), "every layer must be routed")
    values.require("mlp_only_layers", ([], None), "every layer must be routed")
    fields = dense.attention_fields(values)
    experts, chosen = values.integer("num_experts"), values.integer("num_experts_per_tok")
    return FamilyConfig(
        family="qwen3_moe",
        rope=RopeSpec.from_hf(hf, head_dim=fields["head_dim"], expected_kind=rope_kind),
        num_experts=experts,
        experts_per_token=chosen,
        transformer={
            "qk_layernorm": True,
            "num_moe_experts": experts,
            "moe_router_topk": chosen,
            "moe_ffn_hidden_size": values.integer("moe_intermediate_size"),
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": False,
            # Softmax over the chosen logits equals normalising the chosen probabilities.
            "moe_router_pre_softmax": not values.boolean("norm_topk_prob"),
        },
        **fields,
    )


def hf_config(shape: ModelShape, vocab_size: int, special: Mapping[str, int | None]) -> dict[str, Any]:
    """config.json of a new Qwen3-MoE checkpoint. `special`: bos/eos/pad token ids."""
    return {
        **dense.hf_config(shape, vocab_size, special),
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_ffn_hidden_size,
        "norm_topk_prob": True,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def shapes(hf: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Every tensor of a Qwen3-MoE checkpoint."""
    hf = complete(hf)
    yield from dense.model_shapes(hf)
    hidden, width = hf["hidden_size"], hf["moe_intermediate_size"]
    for layer in range(hf["num_hidden_layers"]):
        yield from dense.attention_shapes(hf, layer)
        prefix = f"model.layers.{layer}.mlp."
        yield prefix + "gate.weight", (hf["num_experts"], hidden), "weight"
        for expert in range(hf["num_experts"]):
            yield from dense.mlp_shapes(f"{prefix}experts.{expert}.", hidden, width)
