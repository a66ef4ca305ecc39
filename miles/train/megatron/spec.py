"""Which building blocks a model is made of: megatron-core's local layers with own norm and attention, or Transformer Engine's."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from miles.models.family import FamilyConfig
from miles.train.config import MegatronConfig
from miles.train.errors import PlatformError
from miles.train.megatron.platform import Platform


@dataclass(frozen=True)
class SpecChoice:
    """Resolved `train.megatron.{spec, attention}`; logged and kept in checkpoints."""

    layers: str
    attention: str


def choose_spec(config: MegatronConfig, platform: Platform) -> SpecChoice:
    """Resolve `auto` to the local layers and the own attention (docs/decisions/0103); `te` is refused with the reason."""
    for option, value in (("spec", config.spec), ("attention", config.attention)):
        if value != "te":
            continue
        if platform.is_cpu or importlib.util.find_spec("transformer_engine") is None:
            raise PlatformError(
                f"train.megatron.{option} is te but Transformer Engine is not usable here "
                f"(device {platform.device.type}); use auto"
            )
        raise PlatformError(
            f"train.megatron.{option} is te but the weight maps have no rows for Transformer Engine's fused layers; "
            "use auto (local layers, own attention)"
        )
    return SpecChoice(layers="local", attention="own")


def layer_spec(model: FamilyConfig, choice: SpecChoice) -> Any:
    """Spec of one decoder layer with own norm and attention in place of megatron-core's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=bool(model.transformer.get("qk_layernorm")),
        normalization="RMSNorm",
    )
    return _with_own_modules(spec)


def block_spec(model: FamilyConfig, choice: SpecChoice, num_layers: int) -> Any:
    """Spec of a pipeline stage's decoder block."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from miles.train.megatron.norm import RMSNorm

    return TransformerBlockSubmodules(layer_specs=[layer_spec(model, choice)] * num_layers, layer_norm=RMSNorm)


def _with_own_modules(node: Any) -> Any:
    """A copy of a spec tree in which megatron-core's norm and attention core are replaced."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from miles.train.megatron.attention import OwnAttention
    from miles.train.megatron.norm import RMSNorm

    own = {DotProductAttention: OwnAttention, WrappedTorchNorm: RMSNorm}
    if isinstance(node, ModuleSpec):
        return replace(node, module=own.get(node.module, node.module), submodules=_with_own_modules(node.submodules))
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{item.name: _with_own_modules(getattr(node, item.name)) for item in fields(node)})
    return own.get(node, node) if isinstance(node, type) else node
