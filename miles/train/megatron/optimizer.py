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
from miles.train.megatron.build import ModelChunk
from miles.train.megatron.mesh import Mesh

MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """One trained parameter: `master` is fp32 and shares storage with `parameter` when that is fp32 too."""

    name: str
    parameter: torch.nn.Parameter
    master: torch.nn.Parameter
    is_expert: bool
    counts_in_norm: bool


class MasterAdamW:
    """Optimizer of this rank's chunks. `step` counts optimizer steps taken."""

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
        decayed = [item.master for item in self.masters if item.master.ndim > 1]
        kept = [item.master for item in self.masters if item.master.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self.refresh_masters()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded from outside."""
        for item in self.masters:
            if item.master.data_ptr() != item.parameter.data_ptr():
                item.master.copy_(item.parameter)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """L2 norm of the step's gradient over the whole model, equal on every rank."""
        parts = []
        for group, expert in ((self.mesh.model_parallel, False), (self.mesh.expert_model_parallel, True)):
            grads = [item.master.grad for item in self.masters if item.counts_in_norm and item.is_expert is expert]
            if not grads and not (expert and self._any_expert):
                continue
            total = (
                torch.stack(torch._foreach_norm(grads)).double().square().sum()
                if grads
                else torch.zeros((), dtype=torch.float64, device=self.masters[0].master.device)
            )
            if dist.get_world_size(group) > 1:
                dist.all_reduce(total, group=group)
            parts.append(total)
        return math.sqrt(float(sum(parts)))

    @property
    def _any_expert(self) -> bool:
        return any(item.is_expert for item in self.masters)

    @torch.no_grad()
    def apply(self, grad_norm: float) -> float:
        """Clip by the given norm, take one AdamW step, write parameters back; returns the learning rate used."""
        scale = self.config.clip_grad / (grad_norm + 1e-6)
        if scale < 1.0:
            for chunk in self.chunks:
                for buffer in (*chunk.ddp.buffers, *chunk.ddp.expert_parallel_buffers):
                    buffer.grad_data.mul_(scale)
        rate = learning_rate(self.steps, self.config)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.steps += 1
        for item in self.masters:
            if item.master.data_ptr() != item.parameter.data_ptr():
                item.parameter.copy_(item.master)
        return rate

    def master_tensors(self) -> dict[str, torch.Tensor]:
        """Global megatron-core name -> fp32 master weight."""
        return {item.name: item.master.detach() for item in self.masters}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """exp_avg and exp_avg_sq by name; empty before the first step."""
        if not self.adam.state:
            return {}
        return {
            moment: {item.name: self.adam.state[item.master][moment] for item in self.masters} for moment in MOMENTS
        }

    @torch.no_grad()
    def restore(
        self, masters: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], steps: int
    ) -> None:
        """Set weights, moments and the step count; `moments` is empty for a checkpoint before the first step."""
        self.adam.state.clear()
        for item in self.masters:
            item.master.copy_(masters[item.name])
            if item.master.data_ptr() != item.parameter.data_ptr():
                item.parameter.copy_(item.master)
            if moments:
                self.adam.state[item.master] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32, device=item.master.device),
                    **{moment: moments[moment][item.name].to(item.master).clone() for moment in MOMENTS},
                }
        self.steps = steps


def _master(name: str, parameter: torch.nn.Parameter, mesh: Mesh, replicated: bool) -> Master:
    same = parameter.dtype == torch.float32
    master = torch.nn.Parameter(parameter.detach() if same else parameter.detach().float())
    # The buffer's view stays valid for the life of the model, so it is set once.
    master.grad = parameter.main_grad
    is_expert = not getattr(parameter, "allreduce", True)
    group = mesh.expert_tp if is_expert else mesh.tp
    duplicate = replicated and dist.get_rank(group) > 0
    return Master(
        name=name,
        parameter=parameter,
        master=master,
        is_expert=is_expert,
        counts_in_norm=not duplicate and not getattr(parameter, "shared", False),
    )
