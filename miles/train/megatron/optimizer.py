"""AdamW on fp32 master weights, with the global gradient norm over megatron-core's mesh.

Gradients arrive summed over data- and context-parallel ranks in megatron-core's fp32 buffers. megatron-core's
own optimizers are not used: they compare type strings with 'torch.cuda.FloatTensor', and their sharded form did
not resume exactly (docs/decisions/0101-own-optimizer-on-core-buffers.md). Leaves out sharding of the
optimizer state over data-parallel ranks: every rank keeps the state of its own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from miles.train.config import OptimizerConfig
from miles.train.convert import MOMENTS
from miles.train.megatron.build import ModelChunk
from miles.train.megatron.mesh import Mesh


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Rate of 0-based optimizer step `step`: linear warm-up, then constant, linear or cosine to `min_lr`.

    >>> cfg = OptimizerConfig(lr=1.0, warmup_steps=2, decay="linear", decay_steps=6)
    >>> [round(learning_rate(s, cfg), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant" or config.decay_steps is None:
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    share = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


@dataclass(frozen=True)
class Master:
    """One trained parameter. `weight` is fp32 and shares storage with `parameter` when that is fp32 too; `grad` is
    megatron-core's buffer, which stays where it is for the life of the model."""

    name: str
    parameter: torch.nn.Parameter
    weight: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    is_expert: bool
    counts_in_norm: bool

    @property
    def is_copy(self) -> bool:
        return self.weight.data_ptr() != self.parameter.data_ptr()


class MasterAdamW:
    """Optimizer of this rank's chunks. `steps` counts optimizer steps taken.

    The update is torch's fused AdamW kernel (Loshchilov and Hutter 2019), called directly: building a
    `torch.optim.Optimizer` would import the compiler, which takes seconds.
    """

    def __init__(
        self, chunks: Sequence[ModelChunk], config: OptimizerConfig, mesh: Mesh, replicated: Callable[[str], bool]
    ) -> None:
        """`replicated(name)`: the parameter is equal on all tensor-parallel ranks (a fact of the weight map)."""
        self.config = config
        self.mesh = mesh
        self.chunks = chunks
        self.steps = 0
        self.masters = [
            _master(name, parameter, mesh, replicated(name))
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        ]
        # Norm weights and other vectors do not decay, as usual for AdamW on transformers.
        self._groups = [
            (decay, [item for item in self.masters if (item.weight.ndim > 1) is (decay > 0.0)])
            for decay in ((config.weight_decay, 0.0) if config.weight_decay > 0 else ())
        ] or [(0.0, self.masters)]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded from outside."""
        for item in self.masters:
            if item.is_copy:
                item.weight.copy_(item.parameter)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """L2 norm of the step's gradient over the whole model, equal on every rank."""
        any_expert = any(item.is_expert for item in self.masters)
        parts = []
        for group, expert in ((self.mesh.model_parallel, False), (self.mesh.expert_model_parallel, True)):
            grads = [item.grad for item in self.masters if item.counts_in_norm and item.is_expert is expert]
            if not grads and not (expert and any_expert):
                continue
            total = (
                torch.stack(torch._foreach_norm(grads)).double().square().sum()
                if grads
                else torch.zeros((), dtype=torch.float64, device=self.masters[0].weight.device)
            )
            if dist.get_world_size(group) > 1:
                dist.all_reduce(total, group=group)
            parts.append(total)
        return math.sqrt(float(sum(parts)))

    @torch.no_grad()
    def apply(self, grad_norm: float) -> float:
        """Clip by the given norm, take one AdamW step, write parameters back; returns the learning rate used."""
        scale = self.config.clip_grad / (grad_norm + 1e-6)
        if scale < 1.0:
            for chunk in self.chunks:
                for buffer in (*chunk.ddp.buffers, *chunk.ddp.expert_parallel_buffers):
                    buffer.grad_data.mul_(scale)
        rate = learning_rate(self.steps, self.config)
        self.steps += 1
        for decay, items in self._groups:
            if items:
                self._update(items, rate, decay)
        for item in self.masters:
            if item.is_copy:
                item.parameter.copy_(item.weight)
        return rate

    def master_tensors(self) -> dict[str, torch.Tensor]:
        """Global megatron-core name -> fp32 master weight."""
        return {item.name: item.weight for item in self.masters}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """exp_avg and exp_avg_sq by name."""
        return {moment: {item.name: getattr(item, moment) for item in self.masters} for moment in MOMENTS}

    @torch.no_grad()
    def restore(
        self, masters: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], steps: int
    ) -> None:
        """Set weights, moments and the step count."""
        for item in self.masters:
            item.weight.copy_(masters[item.name])
            if item.is_copy:
                item.parameter.copy_(item.weight)
            for moment in MOMENTS:
                getattr(item, moment).copy_(moments[moment][item.name])
        self.steps = steps

    def _update(self, items: Sequence[Master], rate: float, decay: float) -> None:
        step = torch.full((), float(self.steps), dtype=torch.float32, device=items[0].weight.device)
        torch._fused_adamw_(
            [item.weight for item in items],
            [item.grad for item in items],
            [item.exp_avg for item in items],
            [item.exp_avg_sq for item in items],
            [],
            [step] * len(items),
            lr=rate,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
        )


def _master(name: str, parameter: torch.nn.Parameter, mesh: Mesh, replicated: bool) -> Master:
    weight = parameter.detach() if parameter.dtype == torch.float32 else parameter.detach().float()
    is_expert = not getattr(parameter, "allreduce", True)
    group = mesh.expert_tp if is_expert else mesh.tp
    duplicate = replicated and dist.get_rank(group) > 0
    return Master(
        name=name,
        parameter=parameter,
        weight=weight,
        grad=parameter.main_grad,  # type: ignore[attr-defined]
        exp_avg=torch.zeros_like(weight),
        exp_avg_sq=torch.zeros_like(weight),
        is_expert=is_expert,
        counts_in_norm=not duplicate and not getattr(parameter, "shared", False),
    )
