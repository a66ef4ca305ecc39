"""Qwen3-MoE: Hugging Face names <-> megatron-core parameters with sequential experts."""

from __future__ import annotations

from miles.models.family import Family
from miles.models.qwen3 import weights as dense
from miles.models.qwen3_moe import config
from miles.models.weightmap import GateUp, Rule, WeightMap, direct

HF_EXPERT = dense.HF_LAYER + "mlp.experts.{expert}."
MCORE_EXPERT = dense.MCORE_LAYER + "mlp.experts.local_experts.{expert}."

EXPERT_RULES: tuple[Rule, ...] = (
    direct(dense.HF_LAYER + "mlp.gate.weight", dense.MCORE_LAYER + "mlp.router.weight"),
    GateUp(
        mcore=MCORE_EXPERT + "linear_fc1.weight",
        hf=(HF_EXPERT + "gate_proj.weight", HF_EXPERT + "up_proj.weight"),
    ),
    direct(HF_EXPERT + "down_proj.weight", MCORE_EXPERT + "linear_fc2.weight", axis=1),
)

MAP = WeightMap(rules=dense.MODEL_RULES + dense.ATTENTION_RULES + EXPERT_RULES, tied=dense.TIED, atomic=dense.ATOMIC)

FAMILY = Family(
    name="qwen3_moe",
    architectures=(config.ARCHITECTURE,),
    to_mcore=config.to_mcore,
    weights=MAP,
    shapes=config.shapes,
    hf_config=config.hf_config,
)
