"""Fake quantisation of routed-expert weights in the forward pass, with a straight-through gradient.

`install` wraps the forward of each module that owns a routed-expert weight: the local spec's
`local_experts.i.linear_fc1/2`, TE grouped linears (`weight0..n`), discrete and packed Hugging Face experts. While
the wrapped forward runs, the module's weight attribute is the quantised tensor; parameters, their names, the
optimizer's masters and state dicts are untouched. Every wrapped module counts its calls and `assert_called` turns a
hook that did not run into an error. This module is imported only where fake quantisation is on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import nvfp4
from miles.quant.errors import QATHookMissing, QuantConfigError, QuantError
from miles.quant.scope import Ignore, Scope, gate_up_partner

BLOCK = 16
_STATE = "_miles_fake_qat"
_WEIGHT = re.compile(r"^(weight\d*|gate_up_proj|down_proj)$")


class _StraightThrough(torch.autograd.Function):
    """Value of `quantised`, gradient of `weight`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
        return quantised.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def shared_amax(
    weights: Sequence[torch.Tensor], slots: Sequence[int], group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
    """Max abs per slot, fp32 [slots], maximum over `group`: that of the whole tensor under expert tensor parallelism."""
    if _takes_kernel(weights):
        from miles.kernels.nvfp4_qdq.api import amax_nvfp4

        amax = amax_nvfp4([w.detach() for w in weights], shared=slots)
    else:
        flat = torch.cat([reference.tensor_amax(w.detach()).reshape(-1) for w in weights])
        amax = flat.new_zeros(max(slots) + 1)
        amax.scatter_reduce_(0, torch.tensor(slots, device=flat.device), flat, "amax")
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return amax


def _takes_kernel(weights: Sequence[torch.Tensor]) -> bool:
    return weights[0].is_cuda and weights[0].dtype in (torch.bfloat16, torch.float16)


def _quantise(
    weights: Sequence[torch.Tensor],
    names: Sequence[str],
    slots: Sequence[int],
    amax: torch.Tensor,
    config: NVFP4QDQConfig,
) -> list[torch.Tensor]:
    """Quantised values: the Triton kernel for half precision on a GPU, the reference elsewhere (same bits).

    The reference refuses a non-finite weight here, the kernel sets a flag that `assert_called` reads after the step.
    """
    weights = [w.detach() for w in weights]
    if _takes_kernel(weights):
        from miles.kernels.nvfp4_qdq.api import qdq_nvfp4

        return qdq_nvfp4(weights, config, amax, shared=slots)
    out, first = [], 0
    for w, name in zip(weights, names, strict=True):
        groups = w.shape[0] if w.dim() == 3 else 1
        own = amax[torch.tensor(slots[first : first + groups], device=amax.device)]
        try:
            out.append(nvfp4.qdq(w, config, amax=own if w.dim() == 3 else own[0], name=name))
        except ValueError as error:
            raise QuantError(f"fake quantisation: {error}") from error
        first += groups
    return out


def _matrices(weights: Sequence[torch.Tensor]) -> int:
    return sum(w.shape[0] if w.dim() == 3 else 1 for w in weights)


def maybe_fake_quantize(
    weights: Sequence[torch.Tensor],
    names: Sequence[str],
    config: NVFP4QDQConfig | None,
    *,
    scope: Scope | None = None,
    slots: Sequence[int] | None = None,
    amax: torch.Tensor | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> list[torch.Tensor]:
    """Quantised weights with identity gradient where the name is in scope; the others, and all for `config=None`, as given.

    `slots` (one per matrix of the scoped weights) lets matrices share a maximum; `amax` fp32 [slots] replaces its
    computation. `main_grad` of a parameter is carried over to the returned tensor.
    """
    scope = scope or Scope()
    chosen = [i for i, name in enumerate(names) if name in scope] if config is not None else []
    out = list(weights)
    if config is None or not chosen:
        return out
    picked = [weights[i] for i in chosen]
    slots = list(range(_matrices(picked))) if slots is None else slots
    if amax is None:
        amax = shared_amax(picked, slots, group)
    quantised = _quantise(picked, [names[i] for i in chosen], slots, amax, config)
    for i, w, q in zip(chosen, picked, quantised, strict=True):
        y = _StraightThrough.apply(w, q)
        if hasattr(w, "main_grad"):
            y.main_grad = w.main_grad
        out[i] = y
    return out


@dataclass
class _Hook:
    """One wrapped module: its scoped parameters, the parameters that share their maximum, and a call counter."""

    name: str
    module: nn.Module
    parameters: list[str]
    partners: Sequence[torch.Tensor]
    forward: Callable
    calls: int = 0


@dataclass
class FakeQAT:
    """What `install` did to one model."""

    config: NVFP4QDQConfig
    group: torch.distributed.ProcessGroup | None
    hooks: list[_Hook] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [f"{h.name}.{p}" if h.name else p for h in self.hooks for p in h.parameters]

    def quantise(self, hook: _Hook) -> list[torch.Tensor]:
        weights = [getattr(hook.module, p) for p in hook.parameters]
        count = _matrices(weights)
        slots = [0] * count if hook.partners else list(range(count))
        every = [*weights, *hook.partners]
        amax = shared_amax(every, slots + [0] * _matrices(hook.partners), self.group)
        names = [f"{hook.name}.{p}" for p in hook.parameters]
        return maybe_fake_quantize(weights, names, self.config, slots=slots, amax=amax)


def _wrap(state: FakeQAT, hook: _Hook) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Scoring runs without gradients: its calls must not make up for a training pass that went without.
        hook.calls += torch.is_grad_enabled()
        values = state.quantise(hook)
        # An instance attribute is found before the registered parameter, which stays where it is.
        for name, value in zip(hook.parameters, values, strict=True):
            hook.module.__dict__[name] = value
        try:
            return hook.forward(*args, **kwargs)
        finally:
            for name in hook.parameters:
                hook.module.__dict__.pop(name, None)

    hook.module.forward = forward


def _check_module(name: str, module: nn.Module, parameters: Sequence[str]) -> None:
    for attribute in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
        if getattr(module, attribute, False):
            raise QuantConfigError(
                f"{name}: gradient accumulation fusion is on; its marker would be set on the quantised copy and the "
                "gradient lost. Set gradient_accumulation_fusion=False for fake quantisation"
            )
    for p in parameters:
        shape = tuple(getattr(module, p).shape)
        if len(shape) not in (2, 3) or shape[-1] % BLOCK:
            raise QuantConfigError(
                f"{name}.{p}: shape {shape}; fake quantisation needs [M, K] or [G, M, K] with the (sharded) K a multiple of {BLOCK}"
            )


def _ignored(name: str, ignore: Ignore, hf_names: Callable[[str], Iterable[str]] | None) -> bool:
    answers = {n: ignore.matches(n) for n in (hf_names(name) if hf_names else (name,))}
    if len(set(answers.values())) > 1:
        kept = ", ".join(n for n, matched in answers.items() if matched)
        raise QuantConfigError(f"the ignore list keeps {kept} but not the other half of {name}; name both halves")
    return any(answers.values())


def install(
    model: nn.Module,
    config: NVFP4QDQConfig,
    *,
    ignore: Ignore | None = None,
    hf_names: Callable[[str], Iterable[str]] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    allow_empty: bool = False,
) -> FakeQAT:
    """Wrap every module of `model` that owns a routed-expert weight. `group`: the expert-tensor-parallel group.

    `ignore` speaks of Hugging Face names: `hf_names` gives those behind a parameter (the same name when left out).
    Raises QuantConfigError when a scoped parameter sits in a module that cannot be wrapped, when there is no routed
    expert (unless `allow_empty`: a pipeline stage without experts), or on a second call.
    """
    if hasattr(model, _STATE):
        raise QuantConfigError("fake quantisation is already installed on this model")
    by_name = dict(model.named_parameters(remove_duplicate=False))
    routed = Scope().select(by_name)
    scoped = {n for n in routed if not _ignored(n, ignore or Ignore(), hf_names)}
    state = FakeQAT(config, group)
    for name, module in model.named_modules(remove_duplicate=False):
        own = [p for p, value in module.named_parameters(recurse=False) if value is not None]
        prefix = f"{name}." if name else ""
        parameters = [p for p in own if prefix + p in scoped and _WEIGHT.match(p)]
        if not parameters:
            continue
        _check_module(name, module, parameters)
        partners = [by_name[q] for p in parameters if (q := gate_up_partner(prefix + p)) and q in by_name]
        state.hooks.append(_Hook(name, module, parameters, partners, module.forward))
    missed = sorted(scoped - set(state.names))
    if missed:
        raise QuantConfigError(f"routed-expert weights in modules that cannot be wrapped: {', '.join(missed[:5])}")
    if not routed and not allow_empty:
        raise QuantConfigError("fake quantisation is on but the model has no routed-expert weight")
    for hook in state.hooks:
        _wrap(state, hook)
    object.__setattr__(model, _STATE, state)
    return state


def _state(model: nn.Module) -> FakeQAT:
    state = getattr(model, _STATE, None)
    if state is None:
        raise QATHookMissing("fake quantisation was never installed on this model")
    return state


def calls(model: nn.Module) -> dict[str, int]:
    """Calls of each wrapped module with gradients since the last reset."""
    return {h.name: h.calls for h in _state(model).hooks}


def reset_calls(model: nn.Module) -> None:
    for hook in _state(model).hooks:
        hook.calls = 0


def assert_called(model: nn.Module, micro_batches: int) -> None:
    """After a step: every wrapped module ran its hook at least once a micro-batch, on finite weights. Resets the counters.

    Raises `QATHookMissing`, and QuantError when a kernel met NaN, an infinity, or a maximum too large for the decode.
    """
    counts = calls(model)
    missing = [f"{name} ({count})" for name, count in counts.items() if count < micro_batches]
    reset_calls(model)
    if missing:
        raise QATHookMissing(
            f"fake quantisation did not run for {len(missing)} of {len(counts)} modules in a step of {micro_batches} "
            f"micro-batches (calls in brackets): {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}"
        )
    if any(_takes_kernel([getattr(h.module, p) for p in h.parameters]) for h in _state(model).hooks):
        from miles.kernels.nvfp4_qdq.api import raise_if_flagged

        try:
            raise_if_flagged()
        except ValueError as error:
            raise QuantError(f"fake quantisation: {error}") from error
