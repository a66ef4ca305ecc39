"""Configuration of training: backend, parallel layout, optimizer, precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles.config import StrictModel


class ParallelConfig(StrictModel):
    """Sizes of the parallel dimensions; world size = tp * pp * cp * dp.

    `etp` null resolves to tp. `vpp`: model chunks per pipeline stage. `last_pp_layers`: layers of the last
    stage when the layers do not divide evenly. `cp_layout`: zigzag gives every rank equal causal work.
    """

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    vpp: int | None = Field(default=None, ge=2)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    etp: int | None = Field(default=None, ge=1)
    dp: int = Field(default=1, ge=1)
    sp: bool = False
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    last_pp_layers: int | None = Field(default=None, ge=1)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.sp and self.tp == 1:
            raise ValueError("sp (sequence parallel) needs tp > 1; set tp or remove sp")
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1; set pp or remove vpp")
        if self.last_pp_layers is not None and self.pp == 1:
            raise ValueError(f"last_pp_layers={self.last_pp_layers} needs pp > 1; set pp or remove it")
        expert_cells = self.expert_tp * self.ep * self.pp
        if self.world_size % expert_cells:
            raise ValueError(
                f"etp*ep*pp = {self.expert_tp}*{self.ep}*{self.pp} = {expert_cells} does not divide the world size "
                f"tp*pp*cp*dp = {self.tp}*{self.pp}*{self.cp}*{self.dp} = {self.world_size}"
            )
        return self


class OptimizerConfig(StrictModel):
    """AdamW on fp32 master weights. The learning rate warms up linearly for `warmup_steps`, then follows `decay`
    to `min_lr` at `decay_steps`."""

    lr: float = Field(default=1e-6, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int | None = Field(default=None, ge=1)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(f"decay={self.decay} needs decay_steps, the step at which min_lr is reached")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps ({self.decay_steps}) must exceed warmup_steps ({self.warmup_steps})")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) must not exceed lr ({self.lr})")
        return self


class RecomputeConfig(StrictModel):
    """Activation recompute. `method` and `num_layers` belong to granularity full, `modules` to selective."""

    granularity: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = Field(default=1, ge=1)
    modules: tuple[Literal["core_attn", "mlp"], ...] = ("core_attn",)


class MegatronConfig(StrictModel):
    """Which megatron-core building blocks are used. `auto`: Transformer Engine (te) where it is importable on a GPU."""

    spec: Literal["auto", "local", "te"] = "auto"
    attention: Literal["auto", "own", "te"] = "auto"
    vocab_multiple: int = Field(default=1, ge=1, description="vocabulary rows per tp rank are a multiple of this")


class TrainConfig(StrictModel):
    """`num_threads`: torch threads of one CPU rank. `timeout_s` bounds every collective. `checkpoint_keep`: newest
    complete checkpoints that survive a save."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: RecomputeConfig = RecomputeConfig()
    megatron: MegatronConfig = MegatronConfig()
    # Compute each distinct prompt of a micro-batch once for all its samples (context parallelism computes all).
    share_prompts: bool = True
    # Log-probs, loss and gradient in one visit of each logit row: auto on GPUs where the algorithm allows it.
    fused_loss: Literal["auto", "on", "off"] = "auto"
    num_threads: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=300.0, gt=0)
    checkpoint_keep: int = Field(default=2, ge=1)
