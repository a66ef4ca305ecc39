"""Qwen3-MoE for inference: Qwen3 with routed experts in place of the dense block. Mathematics only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from miles.models.errors import ModelError
from miles.models.family import HFConfig
from miles.rollout.engines.embedded.attention import ROW_BLOCK
from miles.rollout.engines.embedded.models.qwen3 import Layer, Qwen3, Qwen3Shape, SwiGLU
from miles.rollout.engines.embedded.models.storage import ParameterStore
from miles.rollout.errors import EngineModelError


@dataclass(frozen=True, slots=True)
class Qwen3MoeShape(Qwen3Shape):
    """`dense_layers` have the plain block of size `intermediate`."""

    experts: int
    experts_per_token: int
    expert_intermediate: int
    normalise: bool
    dense_layers: frozenset[int]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen3MoeShape:
        base = Qwen3Shape.from_config(config)
        step = config.get("decoder_sparse_step", 1)
        dense = {i for i in range(base.layers) if (i + 1) % step} | set(config.get("mlp_only_layers") or [])
        try:
            hf = HFConfig(config)
            return cls(
                **{f.name: getattr(base, f.name) for f in fields(base)},
                experts=hf.integer("num_experts"),
                experts_per_token=hf.integer("num_experts_per_tok"),
                expert_intermediate=hf.integer("moe_intermediate_size"),
                normalise=hf.boolean("norm_topk_prob"),
                dense_layers=frozenset(dense),
            )
        except ModelError as error:
            raise EngineModelError(f"{error}; use a complete Qwen3-MoE checkpoint") from None


class RoutedExperts:
    """Sum over the chosen experts of down(silu(gate(x)) * up(x) * weight), in megatron-core's order of operations."""

    def __init__(self, store: ParameterStore, prefix: str, shape: Qwen3MoeShape) -> None:
        self.shape = shape
        self.router = store.add(f"{prefix}.gate.weight", shape.experts, shape.hidden)
        self.experts = [
            SwiGLU(store, f"{prefix}.experts.{e}", shape.hidden, shape.expert_intermediate)
            for e in range(shape.experts)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        # Experts in ascending order: a token's sum does not depend on the other tokens.
        for expert in torch.unique(chosen).tolist():
            rows, place = torch.nonzero(chosen == expert, as_tuple=True)
            surplus = -len(rows) % ROW_BLOCK
            scale = F.pad(weights[rows, place], (0, surplus))[:, None]
            result = self.experts[expert](F.pad(x[rows], (0, 0, 0, surplus)), scale)
            out.index_add_(0, rows, result[: len(rows)])
        return out

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [n, k] in x's dtype, expert ids int64 [n, k]), probabilities in float32.

        Normalised weights are a softmax over the chosen experts, others are taken from the softmax over all.
        """
        scores, k = F.linear(x, self.router), self.shape.experts_per_token
        if self.shape.normalise:
            top, chosen = torch.topk(scores, k, dim=-1)
            weights = torch.softmax(top, dim=-1, dtype=torch.float32)
        else:
            weights, chosen = torch.topk(torch.softmax(scores, dim=-1, dtype=torch.float32), k, dim=-1)
        return weights.to(x.dtype), chosen


class MoeLayer(Layer):
    def build_mlp(self, store: ParameterStore, prefix: str) -> SwiGLU | RoutedExperts:
        shape = self.shape
        assert isinstance(shape, Qwen3MoeShape)
        if self.index in shape.dense_layers:
            return SwiGLU(store, prefix, shape.hidden, shape.intermediate)
        return RoutedExperts(store, prefix, shape)


class Qwen3Moe(Qwen3):
    layer_class = MoeLayer
    shape_class = Qwen3MoeShape
