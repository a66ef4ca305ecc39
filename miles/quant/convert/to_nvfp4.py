"""Routed experts to NVFP4 with shared gate/up maxima: `bf16-to-nvfp4`, and `requantise` for quantised checkpoints.

`requantise` first decodes what is quantised to bf16 (NVFP4, FP8 128x128): experts are then quantised by the asked
configuration, all else (shared experts above all) stays bf16. Rounding twice loses; the contract says `lossless: false`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant import contract as contracts
from miles.quant.codecs import nvfp4
from miles.quant.contract import nvfp4_contract
from miles.quant.convert.decoding import Decoded, decoded_weights
from miles.quant.convert.planning import compact_excludes, keep, producer, refuse, scope_of
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.packed import stored_names
from miles.quant.scope import Scope, check_pairs, gate_up_partner

Kind = Literal["bf16-to-nvfp4", "requantise"]
FLOATS = ("BF16", "F16", "F32")


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
            self._known[partner] = reference.tensor_amax(self._load(partner))
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
    input_scale = scale_2.replace("weight_scale_2", "input_scale").replace("_scale_2", "_input_scale")
    groups = shape[:-2]
    per_tensor = (*groups, 1, 1) if groups else (1,)
    specs = (
        TensorSpec(weight, "U8", (*shape[:-1], shape[-1] // 2)),
        TensorSpec(scale, "F8_E4M3", (*shape[:-1], shape[-1] // nvfp4.BLOCK)),
        TensorSpec(scale_2, "F32", per_tensor),
        TensorSpec(input_scale, "F32", per_tensor),
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


def _experts(
    source: Source, kind: Kind, shapes: dict[str, tuple[int, ...]], decoded: dict[str, Decoded], scope: Scope
) -> list[str]:
    """Names in scope, checked: a readable dtype, K in whole blocks, both halves of every pair."""
    names, faults = scope.select(shapes), []
    for name in names:
        spec = source.tensors[name].spec
        if name not in decoded and spec.dtype not in FLOATS:
            other = "; requantise reads NVFP4 and FP8 128x128 with their scales" if kind == "requantise" else (
                "; for a quantised checkpoint use `miles convert requantise`"
            )  # fmt: skip
            faults.append(f"{name}: dtype {spec.dtype}, {kind} reads {', '.join(FLOATS)}{other}")
        elif len(shapes[name]) not in (2, 3) or shapes[name][-1] % nvfp4.BLOCK or 0 in shapes[name]:
            faults.append(f"{name}: shape {list(shapes[name])} does not end in a multiple of {nvfp4.BLOCK}")
    try:
        check_pairs(names)
    except ValueError as error:
        faults.append(str(error))
    if not names:
        faults.append("no routed-expert weight in scope; `miles convert bf16-to-fp8` converts dense projections")
    refuse(source, faults)
    return names


def plan(source: Source, config: NVFP4QDQConfig, scope: Scope, kind: Kind) -> Plan:
    """Scan and lay out the output; raises before anything is written."""
    decoded = decoded_weights(source) if kind == "requantise" else {}
    consumed = {n for d in decoded.values() for n in d.inputs}
    plain = [n for n in source.tensors if n not in consumed]
    shapes = {n: d.shape for n, d in decoded.items()} | {n: source.tensors[n].spec.shape for n in plain}
    names = _experts(source, kind, shapes, decoded, scope)

    def load(name: str) -> torch.Tensor:
        return decoded[name].load() if name in decoded else source.load(name)

    chosen, maxima = set(names), PairMaxima(load)
    items = [_expert_item(source.tensors[n].shard, n, shapes[n], load, maxima, config) for n in names]
    items += [_bf16_item(source, d) for n, d in decoded.items() if n not in chosen]
    items += keep(source, (n for n in plain if n not in chosen))
    ignore = scope.ignore.compact()
    contract = nvfp4_contract(config, names, source_digest=source.digest, producer=producer(kind), ignore=ignore)
    _require_trained_rounding(source, contract)
    new = {k: v for k, v in source.config.items() if k != "quantization_config"}
    new["quantization_config"] = nvfp4_quantization_config(
        config, compact_excludes((n for n in shapes if n not in chosen), names)
    )
    return Plan(kind, {"decode": config.decode, "ignore": list(ignore)}, items, contract, new)


def _require_trained_rounding(source: Source, contract: contracts.QuantContract) -> None:
    """The weights of a model that was trained with fake quantisation take the rounding they were trained with."""
    if not (source.directory / contracts.FILE).exists():
        return
    trained = contracts.read(source.directory)
    if trained.weights == "masters":
        contracts.require_equal(
            trained,
            contract,
            where=f"{source.directory} was trained with fake quantisation; convert it with the same options",
        )


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
