"""Qwen3 for inference: mathematics only. Caching, batching and sampling live elsewhere.

All rows are independent: row i of every result depends on row i of the inputs and on what `attend` gives it. Who
calls with a multiple of 16 rows gets values that do not depend on the other rows (see `invariance`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from miles.models.errors import ModelError
from miles.models.family import HFConfig
from miles.models.rope import RopeSpec
from miles.rollout.engines.embedded.models.storage import ParameterStore
from miles.rollout.errors import EngineModelError

if TYPE_CHECKING:
    from miles.rollout.engines.embedded.models import Attend


@dataclass(frozen=True, slots=True)
class Qwen3Shape:
    """What the mathematics needs of `config.json`."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen3Shape:
        """`EngineModelError` names a missing key or an option that this engine does not compute."""
        try:
            hf = HFConfig(config)
            hf.require("hidden_act", ("silu", "swish"), "only the gated SiLU MLP is served")
            hf.require("use_sliding_window", (False, None), "sliding windows are not served")
            hf.require("per_layer_config", (None, {}), "layers of one model are served alike")
            layers, head_dim = hf.integer("num_hidden_layers"), hf.integer("head_dim")
            hf.require("layer_types", (None, ["full_attention"] * layers), "every layer attends to all tokens")
            shape = cls(
                vocab_size=hf.integer("vocab_size"),
                hidden=hf.integer("hidden_size"),
                intermediate=hf.integer("intermediate_size"),
                layers=layers,
                heads=hf.integer("num_attention_heads"),
                kv_heads=hf.integer("num_key_value_heads"),
                head_dim=head_dim,
                norm_eps=hf.number("rms_norm_eps"),
                rope_theta=_rope_theta(RopeSpec.from_hf(config, head_dim=head_dim), head_dim),
                max_positions=hf.integer("max_position_embeddings"),
                tied=hf.boolean("tie_word_embeddings"),
                bias=bool(config.get("attention_bias", False)),
            )
        except ModelError as error:
            raise EngineModelError(f"{error}; use a complete Qwen3 checkpoint, or engine.engine=sglang") from None
        if shape.heads % shape.kv_heads:
            raise EngineModelError(
                f"config.json: num_attention_heads {shape.heads} is no multiple of num_key_value_heads {shape.kv_heads}"
            )
        return shape


def _rope_theta(rope: RopeSpec, head_dim: int) -> float:
    if rope.kind != "plain" or rope.dim != head_dim or rope.interleaved:
        raise ModelError(
            f"config.json: rotary embedding of kind {rope.kind} over {rope.dim} of {head_dim} channels"
            f"{' in interleaved pairs' if rope.interleaved else ''} is not served, only the plain one over all"
        )
    return rope.theta


class SwiGLU:
    """down(silu(gate(x)) * up(x) * scale), gate and up as one matrix. `scale` [n, 1]: a router's weights."""

    def __init__(self, store: ParameterStore, prefix: str, hidden: int, intermediate: int) -> None:
        self.gate_up = store.fused(
            {f"{prefix}.{part}.weight": (intermediate, hidden) for part in ("gate_proj", "up_proj")}
        )
        self.down = store.add(f"{prefix}.down_proj.weight", hidden, intermediate)

    def __call__(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        inner = F.silu(gate) * up
        return F.linear(inner if scale is None else inner * scale, self.down)


class Layer:
    def __init__(self, store: ParameterStore, index: int, shape: Qwen3Shape) -> None:
        prefix = f"model.layers.{index}"
        attn = f"{prefix}.self_attn"
        rows = {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
        self.index, self.shape = index, shape
        self.input_norm = store.add(f"{prefix}.input_layernorm.weight", shape.hidden)
        self.qkv = store.fused({f"{attn}.{n}.weight": (h * shape.head_dim, shape.hidden) for n, h in rows.items()})
        self.out = store.add(f"{attn}.o_proj.weight", shape.hidden, shape.heads * shape.head_dim)
        self.qkv_bias = self.out_bias = None
        if shape.bias:
            self.qkv_bias = store.fused({f"{attn}.{n}.bias": (h * shape.head_dim,) for n, h in rows.items()})
            self.out_bias = store.add(f"{attn}.o_proj.bias", shape.hidden)
        head_norms = store.fused({f"{attn}.{n}.weight": (shape.head_dim,) for n in ("q_norm", "k_norm")})
        self.head_norms = head_norms.view(2, shape.head_dim)
        self.head_kind = torch.tensor([0] * shape.heads + [1] * shape.kv_heads, device=store.device)
        self.post_norm = store.add(f"{prefix}.post_attention_layernorm.weight", shape.hidden)
        self.mlp = self.build_mlp(store, f"{prefix}.mlp")

    def build_mlp(self, store: ParameterStore, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return SwiGLU(store, prefix, self.shape.hidden, self.shape.intermediate)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        s, n = self.shape, x.shape[0]
        normed = F.rms_norm(x, (s.hidden,), self.input_norm, s.norm_eps)
        qkv = F.linear(normed, self.qkv, self.qkv_bias).view(n, s.heads + 2 * s.kv_heads, s.head_dim)
        # q and k share one pass of norm and rotation.
        qk = F.rms_norm(qkv[:, : s.heads + s.kv_heads], (s.head_dim,), None, s.norm_eps)
        qk = rotate(qk * self.head_norms[self.head_kind], cos, sin)
        mixed = attend(self.index, qk[:, : s.heads], qk[:, s.heads :], qkv[:, s.heads + s.kv_heads :])
        x = x + F.linear(mixed, self.out, self.out_bias)
        return x + self.mlp(F.rms_norm(x, (s.hidden,), self.post_norm, s.norm_eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form. x [n, heads, dim]; cos, sin [n, 1, dim/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Qwen3:
    """`hidden_states(tokens [n], positions [n], attend)` -> [n, hidden]; `logits(rows)` -> float32 [n, vocab]."""

    layer_class = Layer
    shape_class: type[Qwen3Shape] = Qwen3Shape

    def __init__(self, shape: Qwen3Shape, *, dtype: torch.dtype, device: torch.device, context: int | None) -> None:
        if context is not None and context > shape.max_positions:
            raise EngineModelError(
                f"engine.context_length {context} is above the model's max_position_embeddings {shape.max_positions}"
            )
        self.shape, self.dtype, self.device = shape, dtype, device
        self.vocab_size, self.num_layers = shape.vocab_size, shape.layers
        self.num_heads, self.num_kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.context_length = context or shape.max_positions
        self.store = ParameterStore(dtype, device)
        self.embed = self.store.add("model.embed_tokens.weight", shape.vocab_size, shape.hidden)
        self.layers = [self.layer_class(self.store, i, shape) for i in range(shape.layers)]
        self.norm = self.store.add("model.norm.weight", shape.hidden)
        if shape.tied:
            self.head = self.embed
            self.store.alias_of["lm_head.weight"] = "model.embed_tokens.weight"
        else:
            self.head = self.store.add("lm_head.weight", shape.vocab_size, shape.hidden)
        self._cos, self._sin = self._rotation_table()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **options: Any) -> Qwen3:
        return cls(cls.shape_class.from_config(config), **options)

    def _rotation_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        # A table, not cos() of each batch: a vectorised cos() may round differently at a row's other position.
        half = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        angles = torch.arange(self.context_length).float()[:, None] * (1.0 / self.shape.rope_theta**half)
        cos, sin = (f(angles)[:, None, :].to(self.device, self.dtype) for f in (torch.cos, torch.sin))
        return cos, sin

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.store.by_name

    def aliases(self) -> Mapping[str, str]:
        return self.store.alias_of

    def hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        cos, sin = self._cos[positions], self._sin[positions]
        x = self.embed[tokens]
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden, (self.shape.hidden,), self.norm, self.shape.norm_eps)
        return F.linear(normed, self.head).float()
