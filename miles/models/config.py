"""Which model a run trains: an existing checkpoint folder, or a small one that the run creates first."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles.config import StrictModel
from miles.config.beside_recipe import RecipePath


class ModelShape(StrictModel):
    """Shape of a created model; the vocabulary comes from the tokenizer. Defaults: about 0.1M parameters."""

    num_layers: int = Field(default=2, ge=1, le=1024)
    hidden_size: int = Field(default=64, ge=8, le=1 << 16)
    ffn_hidden_size: int = Field(default=128, ge=8, le=1 << 18)
    heads: int = Field(default=4, ge=1, le=1024)
    groups: int = Field(default=2, ge=1, le=1024)
    head_dim: int = Field(default=16, ge=2, le=1024)
    max_positions: int = Field(default=512, ge=2, le=1 << 24)
    rope_theta: float = Field(default=10000.0, gt=0)
    tied: bool = False
    init_std: float = Field(default=0.02, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_experts: int = Field(default=8, ge=2, le=4096, description="routed experts (MoE families only)")
    experts_per_token: int = Field(default=2, ge=1, description="experts a token goes to (MoE families only)")
    expert_ffn_hidden_size: int = Field(default=32, ge=8, description="width of one expert (MoE families only)")

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        if self.heads % self.groups:
            raise ValueError(f"heads ({self.heads}) must be a multiple of groups ({self.groups})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary embedding turns pairs of channels")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) cannot exceed num_experts ({self.num_experts})"
            )
        return self


class RopeConfig(StrictModel):
    """`type` null: whatever the checkpoint says; otherwise it must agree with the checkpoint."""

    type: Literal["plain", "linear", "yarn", "llama3"] | None = None


class ModelConfig(StrictModel):
    """`path`: a Hugging Face folder; `from_recipe`: the recipe of a run whose exported model this one starts from, run
    first where it is not finished. Without both, a model of `family` and `create` is made from the run's seed."""

    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    path: str | None = None
    from_recipe: RecipePath | None = None
    create: ModelShape = ModelShape()
    rope: RopeConfig = RopeConfig()

    @model_validator(mode="after")
    def _one_beginning(self) -> ModelConfig:
        if self.path is not None and self.from_recipe is not None:
            raise ValueError("path and from_recipe both say which model the run starts from; remove one of them")
        return self
