"""Routed experts to NVFP4 with shared gate/up maxima: `bf16-to-nvfp4`, and `requantise` for quantised checkpoints.

`requantise` first decodes what is quantised to bf16: experts are then quantised by the asked configuration, all else
(shared experts above all) stays bf16, and a form that it does not know is refused. Rounding twice loses; the contract
says `lossless: false`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import nvfp4
from miles.quant.codecs.checks import check_finite
from miles.quant.contract import nvfp4_contract
from miles.quant.convert.decoding import READS, Decoded, decoded_weights
from miles.quant.convert.leftovers import quantised_left
from miles.quant.convert.planning import compact_excludes, keep, producer, refuse, scope_of
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.packed import input_scale_name, stored_names
from miles.quant.scope import Scope, check_pairs, gate_up_partner

Kind = Literal["bf16-to-nvfp4", "requantise"]
FLOATS = ("BF16", "F16", "F32")
REQUANTISE = "for a quantised checkpoint use `miles convert requantise`"


class PairMaxima:
    """Tensor maxima of gate/up pairs: the partner is read once for its maximum, wherever it lives."""

    def __init__(self, load: Callable[[str], torch.Tensor]) -> None:
        self._load = load
        self._known: dict[str, torch.Tensor] = {}

    def of(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        partner = gate_up_partner(name)
        if partner is None:
            return reference.tensor_amax(weight)
        self._known[name] = reference.tensor_amax(weight)
        if partner not in self._known:
            other = self._load(partner)
            check_finite(other, partner)
            self._known[partner] = reference.tensor_amax(other)
        return torch.maximum(self._known[name], self._known[partner])


def max_abs_error(weight: torch.Tensor, packed: nvfp4.Packed, config: NVFP4QDQConfig) -> float:
    """Largest |decoded - original| in fp32, a few rows at a time."""
    step = max(1, nvfp4.CHUNK // (weight.numel() // weight.shape[-2]))
    worst = 0.0
    for start in range(0, weight.shape[-2], step):
        rows = (..., slice(start, start + step), slice(None))
        part = nvfp4.Packed(packed.weight[rows], packed.weight_scale[rows], packed.weight_scale_2, packed.amax)
        difference = nvfp4.dequantize(part, config, torch.float32) - weight[rows].float()
        worst = max(worst, float(difference.abs().max()))
    return worst


def _expert_item(
    shard: str,
    name: str,
    shape: tuple[int, ...],
    load: Callable[[str], torch.Tensor],
    maxima: PairMaxima,
    config: NVFP4QDQConfig,
) -> Item:
    """Packed weight, E4M3 block scale, fp32 tensor scale, and an input scale of one (weights only)."""
    weight, scale, scale_2 = stored_names(name)
    groups = shape[:-2]
    per_tensor = (*groups, 1, 1) if groups else (1,)
    specs = (
        TensorSpec(weight, "U8", (*shape[:-1], shape[-1] // 2)),
        TensorSpec(scale, "F8_E4M3", (*shape[:-1], shape[-1] // nvfp4.BLOCK)),
        TensorSpec(scale_2, "F32", per_tensor),
        TensorSpec(input_scale_name(name), "F32", per_tensor),
    )

    def run() -> Done:
        source = load(name)
        packed = nvfp4.quantize(source, config, amax=maxima.of(name, source), name=name)
        report = TensorReport(name, "nvfp4", max_abs_error=max_abs_error(source, packed, config))
        scales = [packed.weight_scale_2, torch.ones_like(packed.weight_scale_2)]
        return Done([packed.weight, packed.weight_scale.view(torch.float8_e4m3fn), *scales], report, [source])

    return Item(shard, specs, run)


def _bf16_item(source: Source, d: Decoded) -> Item:
    def run() -> Done:
        inputs = [source.load(n) for n in d.inputs]
        return Done([d.load()], TensorReport(d.name, "decoded to bf16"), inputs)

    return Item(source.tensors[d.name].shard, (TensorSpec(d.name, "BF16", d.shape),), run)


def nvfp4_quantization_config(config: NVFP4QDQConfig, excluded: Sequence[str]) -> dict:
    """`quantization_config` of config.json, in the form that inference engines read.

    They take the excluded modules from `ignore` here, and from `exclude_modules` in ModelOpt's own file.
    """
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": nvfp4.BLOCK,
        "ignore": list(excluded),
        "exclude_modules": list(excluded),
        "four_over_six": config.use_4over6,
    }


def _expert_faults(
    source: Source, kind: Kind, names: Sequence[str], shapes: dict[str, tuple[int, ...]], decoded: dict[str, Decoded]
) -> list[str]:
    """What is wrong with the names in scope: a dtype that is not read, K not in whole blocks, halves that do not fit."""
    faults = []
    for name in names:
        spec, partner = source.tensors[name].spec, gate_up_partner(name)
        if name not in decoded and spec.dtype not in FLOATS:
            faults.append(f"{name}: dtype {spec.dtype}, {kind} reads {', '.join(FLOATS)}; {_advice(kind)}")
        elif len(shapes[name]) not in (2, 3) or shapes[name][-1] % nvfp4.BLOCK or 0 in shapes[name]:
            faults.append(f"{name}: shape {list(shapes[name])} does not end in a multiple of {nvfp4.BLOCK}")
        elif partner is not None and name < partner and shapes[name] != shapes.get(partner, shapes[name]):
            faults.append(
                f"{name}: shape {list(shapes[name])}, but its other half {partner} has {list(shapes[partner])}"
            )
    try:
        check_pairs(names)
    except ValueError as error:
        faults.append(str(error))
    if not names:
        faults.append("no routed-expert weight in scope; `miles convert bf16-to-fp8` converts dense projections")
    return faults


def _advice(kind: Kind) -> str:
    return f"requantise reads {READS}" if kind == "requantise" else REQUANTISE


def plan(source: Source, config: NVFP4QDQConfig, scope: Scope, kind: Kind) -> Plan:
    """Scan and lay out the output; raises before anything is written."""
    decoded, faults = decoded_weights(source) if kind == "requantise" else ({}, [])
    consumed = {n for d in decoded.values() for n in d.inputs}
    plain = [n for n in source.tensors if n not in consumed]
    shapes = {n: d.shape for n, d in decoded.items()} | {n: source.tensors[n].spec.shape for n in plain}
    names = scope.select(shapes)
    chosen = set(names)
    kept = [n for n in plain if n not in chosen]
    faults += _expert_faults(source, kind, names, shapes, decoded)
    faults += quantised_left(source, kept, reads=_advice(kind), written={s for n in names for s in stored_names(n)})
    refuse(source, faults)

    def load(name: str) -> torch.Tensor:
        return decoded[name].load() if name in decoded else source.load(name)

    maxima = PairMaxima(load)
    items = [_expert_item(source.tensors[n].shard, n, shapes[n], load, maxima, config) for n in names]
    items += [_bf16_item(source, d) for n, d in decoded.items() if n not in chosen]
    items += keep(source, kept)
    ignore = scope.ignore.compact()
    contract = nvfp4_contract(config, names, source_digest=source.digest, producer=producer(kind), ignore=ignore)
    new = {k: v for k, v in source.config.items() if k != "quantization_config"}
    new["quantization_config"] = nvfp4_quantization_config(
        config, compact_excludes((n for n in shapes if n not in chosen), names)
    )
    return Plan(kind, {"decode": config.decode, "ignore": list(ignore)}, items, contract, new)


def convert(
    source: Path,
    target: Path,
    *,
    kind: Kind = "bf16-to-nvfp4",
    config: NVFP4QDQConfig | None = None,
    ignore: Sequence[str] = (),
    bf16_first_layers: int = 0,
    bf16_last_layers: int = 0,
    resume: bool = False,
) -> dict:
    """Convert `source` into `target` by `config` (default: standard NVFP4); returns the report."""

    def make_plan(opened: Source) -> Plan:
        scope = scope_of(opened, ignore, bf16_first_layers, bf16_last_layers)
        return plan(opened, config or NVFP4QDQConfig(), scope, kind)

    return execute(source, target, make_plan, resume=resume)
