"""Packed NVFP4 weights: for export, for a checkpoint, and for an engine that stores experts packed.

`pack_named` turns a stream of Hugging Face tensors into the stored form (gate and up share one tensor maximum, held
back until both are there); `PackedExperts` keeps an engine's routed experts packed and hands out what the contract's
decode gives. Values are those of `codecs.nvfp4`, so a trainer that fake-quantises and an engine that decodes agree
bit for bit when both use the same configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import nvfp4
from miles.quant.codecs.nvfp4 import Packed
from miles.quant.scope import Scope, gate_up_partner


def pair_amax(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The shared maximum of two halves: fp32 scalar, or [G]."""
    return torch.maximum(reference.tensor_amax(first), reference.tensor_amax(second))


def quantised_pairs(
    named: Iterable[tuple[str, torch.Tensor]], config: NVFP4QDQConfig, scope: Scope
) -> Iterator[tuple[str, torch.Tensor | Packed]]:
    """Each tensor of `named`, packed if in scope. A gate or up half waits for the other (in any order, in any shard).

    ValueError: a half came twice, or the stream ended without its partner.
    """
    waiting: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    for name, tensor in named:
        if name in done or name in waiting:
            raise ValueError(f"{name} came twice")
        if name not in scope:
            yield name, tensor
            continue
        partner = gate_up_partner(name)
        if partner is None or partner not in scope:
            done.add(name)
            yield name, nvfp4.quantize(tensor, config, name=name)
        elif partner in waiting:
            other = waiting.pop(partner)
            amax = pair_amax(tensor, other)
            done.update((name, partner))
            yield partner, nvfp4.quantize(other, config, amax=amax, name=partner)
            yield name, nvfp4.quantize(tensor, config, amax=amax, name=name)
        else:
            waiting[name] = tensor
    if waiting:
        raise ValueError(f"gate/up half without its partner: {', '.join(sorted(waiting)[:5])}")


def stored_names(name: str) -> tuple[str, str, str]:
    """(`weight`, `weight_scale`, `weight_scale_2`) names; packed experts without `.weight` get suffixes with `_`."""
    if name.endswith(".weight"):
        stem = name[: -len("weight")]
        return name, stem + "weight_scale", stem + "weight_scale_2"
    return name, name + "_scale", name + "_scale_2"


def pack_named(
    named: Iterable[tuple[str, torch.Tensor]], config: NVFP4QDQConfig, *, scope: Scope | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """W4A16 export: `weight` uint8, `weight_scale` float8_e4m3fn, `weight_scale_2` fp32; no input scale."""
    for name, value in quantised_pairs(named, config, scope or Scope()):
        if not isinstance(value, Packed):
            yield name, value
            continue
        weight, scale, scale_2 = stored_names(name)
        yield weight, value.weight
        yield scale, value.weight_scale.view(torch.float8_e4m3fn)
        yield scale_2, value.weight_scale_2


class PackedExperts:
    """An engine's routed experts in packed form, beside the live tensors that its forward pass reads.

    `hf_name(name)` gives the Hugging Face name of an engine tensor (the identity by default); fused gate/up tensors
    are named by their `experts.gate_up_proj` form, or by either half.
    """

    def __init__(
        self,
        config: NVFP4QDQConfig,
        *,
        scope: Scope | None = None,
        hf_name: Callable[[str], str] = lambda name: name,
    ) -> None:
        self.config = config
        self.scope = scope or Scope()
        self.hf_name = hf_name
        self.store: dict[str, Packed] = {}

    def refresh(self, live: Mapping[str, torch.Tensor]) -> int:
        """After a weight update: pack every scoped tensor and overwrite it with its decoded value; returns the count.

        The live tensors hold what the trainer sent; packing a decoded tensor again would not be the identity, so call
        this once per update.
        """
        by_hf = {self.hf_name(name): (name, tensor) for name, tensor in live.items()}
        stream = ((hf, tensor) for hf, (_, tensor) in by_hf.items())
        self.store = {by_hf[hf][0]: value for hf, value in self._pairs(stream) if isinstance(value, Packed)}
        for name in self.store:
            live[name].copy_(self.decode(name, live[name].dtype))
        return len(self.store)

    def _pairs(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor | Packed]]:
        tensors = dict(stream)
        fused = {n: t for n, t in tensors.items() if n in self.scope and gate_up_partner(n) not in tensors}
        for name, tensor in fused.items():
            yield name, nvfp4.quantize(tensor, self.config, name=name)
        yield from quantised_pairs(((n, t) for n, t in tensors.items() if n not in fused), self.config, self.scope)

    def decode(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The weight of an engine tensor by the configuration's decode."""
        return nvfp4.dequantize(self.store[name], self.config, dtype)

    @property
    def nbytes(self) -> int:
        return sum(
            t.numel() * t.element_size()
            for p in self.store.values()
            for t in (p.weight, p.weight_scale, p.weight_scale_2)
        )
