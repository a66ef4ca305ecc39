"""Packed NVFP4 weights: for export, for a checkpoint, and for an engine that stores experts packed.

`pack_named` turns a stream of Hugging Face tensors into the stored form (gate and up share one tensor maximum, held
back until both are there); `PackedExperts` keeps an engine's routed experts packed and hands out what the contract's
decode gives. Values are those of `codecs.nvfp4`, so a trainer that fake-quantises and an engine that decodes agree
bit for bit when both use the same configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import nvfp4
from miles.quant.codecs.nvfp4 import Packed
from miles.quant.scope import Scope, gate_up_partner

BATCH = 1 << 22


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


def input_scale_name(name: str) -> str:
    """Name of the scale of a weight's activations, beside `stored_names`."""
    return name[: -len("weight")] + "input_scale" if name.endswith(".weight") else name + "_input_scale"


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


def _alike(names: Iterable[str], tensor: Callable[[str], torch.Tensor]) -> Iterator[list[str]]:
    """Names of matrices of one shape and dtype, in batches of at most about 4M elements; [G, M, K] tensors alone."""
    groups: dict[tuple, list[str]] = {}
    for name in names:
        t = tensor(name)
        key = (t.shape, t.dtype, t.device) if t.dim() == 2 else (name,)
        groups.setdefault(key, []).append(name)
    for group in groups.values():
        size = max(1, BATCH // tensor(group[0]).numel())
        yield from (group[start : start + size] for start in range(0, len(group), size))


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
        this once per update. Experts of one shape are packed together: their number costs more than their size.
        """
        by_hf = {self.hf_name(name): name for name in live}
        chosen = [hf for hf in by_hf if hf in self.scope]
        own = {hf: reference.tensor_amax(live[by_hf[hf]]) for hf in chosen}
        # A fused gate/up tensor named by one of its halves has no partner here, and shares its own maximum.
        amax = {hf: torch.maximum(own[hf], own.get(gate_up_partner(hf) or hf, own[hf])) for hf in chosen}
        self.store = {}
        for batch in _alike(chosen, lambda hf: live[by_hf[hf]]):
            self._pack([by_hf[hf] for hf in batch], live, [amax[hf] for hf in batch])
        return len(self.store)

    def _pack(self, names: Sequence[str], live: Mapping[str, torch.Tensor], amax: Sequence[torch.Tensor]) -> None:
        if live[names[0]].dim() == 3:
            packs = [nvfp4.quantize(live[names[0]], self.config, amax=amax[0], name=names[0])]
        else:
            weights, maxima = torch.stack([live[name] for name in names]), torch.stack(list(amax))
            together = nvfp4.quantize(weights, self.config, amax=maxima, name=f"{names[0]} and {len(names) - 1} more")
            packs = [
                Packed(weight, scale, s_dec.view(1), a.view(1))
                for weight, scale, s_dec, a in zip(
                    together.weight, together.weight_scale, together.weight_scale_2, together.amax, strict=True
                )
            ]
        for name, packed in zip(names, packs, strict=True):
            self.store[name] = packed
            live[name].copy_(self.decode(name, live[name].dtype))

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
