"""bf16 (fp16, fp32) checkpoints to NVFP4 experts, or to FP8 with 128x128 scales."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import fp8_block, nvfp4
from miles.quant.contract import QuantContract, nvfp4_contract, scope_digest
from miles.quant.convert.planning import compact_excludes, decoder_layers, keep, producer
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.errors import ConversionError
from miles.quant.packed import stored_names
from miles.quant.scope import Ignore, Scope, check_pairs, edge_layers_ignore, gate_up_partner

FLOAT_DTYPES = ("BF16", "F16", "F32")
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123]|\.q_[ab]_proj|\.kv_[ab]_proj)\.weight$")
Fp8Scope = Literal["experts", "linears"]


def scope_of(source: Source, ignore: Sequence[str], first: int, last: int) -> Scope:
    """The user's ignore list plus the first and last bf16 decoder layers."""
    edges = edge_layers_ignore(decoder_layers(source.config), first, last).entries if first or last else ()
    return Scope(Ignore((*ignore, *edges)))


def _selected(source: Source, chosen: Callable[[str], bool], block: int) -> list[str]:
    names, faults = [], []
    for name, stored in source.tensors.items():
        if not chosen(name):
            continue
        spec = stored.spec
        if spec.dtype not in FLOAT_DTYPES:
            faults.append(f"{name}: dtype {spec.dtype}; this conversion starts from {', '.join(FLOAT_DTYPES)}")
        elif len(spec.shape) not in (2, 3) or spec.shape[-1] % block:
            faults.append(f"{name}: shape {list(spec.shape)} does not end in a multiple of {block}")
        names.append(name)
    if faults:
        raise ConversionError("the checkpoint cannot be converted:\n  " + "\n  ".join(faults[:100]))
    if not names:
        raise ConversionError(f"{source.directory}: no weight in scope")
    return names


class PairMaxima:
    """Tensor maxima of gate/up pairs: the partner is read once for its maximum, wherever it lives."""

    def __init__(self, load: Callable[[str], torch.Tensor]) -> None:
        self._load = load
        self._known: dict[str, torch.Tensor] = {}

    def of(self, name: str, weight: torch.Tensor, partner: str | None) -> torch.Tensor:
        self._known[name] = reference.tensor_amax(weight)
        if partner is None:
            return self._known.pop(name)
        if partner not in self._known:
            self._known[partner] = reference.tensor_amax(self._load(partner))
        return torch.maximum(self._known[name], self._known[partner])


def nvfp4_item(
    shard: str,
    name: str,
    shape: tuple[int, ...],
    load: Callable[[], torch.Tensor],
    maxima: PairMaxima,
    partner: str | None,
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
        TensorSpec(
            scale_2.replace("weight_scale_2", "input_scale").replace("_scale_2", "_input_scale"), "F32", per_tensor
        ),
    )

    def run() -> Done:
        source = load()
        report = TensorReport(name, "nvfp4")
        packed = nvfp4.quantize(source, config, amax=maxima.of(name, source, partner), name=name)
        back = nvfp4.dequantize(packed, config, torch.float32)
        report.max_abs_error = float((back - source.float()).abs().max())
        scales = [packed.weight_scale_2, torch.ones_like(packed.weight_scale_2)]
        return Done([packed.weight, packed.weight_scale.view(torch.float8_e4m3fn), *scales], report, [source])

    return Item(shard, specs, run)


def nvfp4_quantization_config(config: NVFP4QDQConfig, excluded: Sequence[str]) -> dict:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": nvfp4.BLOCK,
        "exclude_modules": list(excluded),
        "four_over_six": config.use_4over6,
    }


def plan_nvfp4(source: Source, config: NVFP4QDQConfig, scope: Scope) -> Plan:
    names = _selected(source, scope.__contains__, nvfp4.BLOCK)
    try:
        check_pairs(names)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    chosen = set(names)
    maxima = PairMaxima(source.load)
    items = []
    for name in names:
        stored = source.tensors[name]
        partner = gate_up_partner(name)
        load = lambda name=name: source.load(name)  # noqa: E731
        items.append(nvfp4_item(stored.shard, name, stored.spec.shape, load, maxima, partner, config))
    items += keep(source, (n for n in source.tensors if n not in chosen))
    contract = nvfp4_contract(
        config, names, source_digest=source.digest, producer=producer("bf16-to-nvfp4"), ignore=scope.ignore.compact()
    )
    excluded = compact_excludes((n for n in source.tensors if n not in chosen), names)
    new = {**source.config, "quantization_config": nvfp4_quantization_config(config, excluded)}
    options = {"decode": config.decode, "ignore": list(scope.ignore.compact())}
    return Plan("bf16-to-nvfp4", options, items, contract, new)


def to_nvfp4(
    source: Path,
    target: Path,
    *,
    config: NVFP4QDQConfig | None = None,
    ignore: Sequence[str] = (),
    bf16_first_layers: int = 0,
    bf16_last_layers: int = 0,
    resume: bool = False,
) -> dict:
    """Routed experts to NVFP4 with shared gate/up maxima; everything else is kept. Returns the report."""
    opened = Source(source)
    scope = scope_of(opened, ignore, bf16_first_layers, bf16_last_layers)
    return execute(opened, target, plan_nvfp4(opened, config or NVFP4QDQConfig(), scope), resume=resume)


def is_linear_weight(name: str) -> bool:
    """2-D projections of attention, dense MLP and experts; never embeddings, head, norms, routers."""
    return _LINEAR.search(name) is not None and "lm_head" not in name


def _fp8_item(source: Source, name: str, scale: fp8_block.ScaleKind) -> Item:
    spec = source.tensors[name].spec
    rows, cols = spec.shape
    grid = (-(-rows // fp8_block.TILE), -(-cols // fp8_block.TILE))
    specs = (
        TensorSpec(name, "F8_E4M3", spec.shape),
        TensorSpec(f"{name}_scale_inv", "F32" if scale == "fp32" else "F8_E8M0", grid),
    )

    def run() -> Done:
        weight = source.load(name)
        report = TensorReport(name, "fp8_128x128", tiles=grid[0] * grid[1])
        q, s = fp8_block.quantize(weight, scale=scale, name=name)
        report.max_abs_error = float((fp8_block.dequantize(q, s, torch.float32) - weight.float()).abs().max())
        stored = s if scale == "fp32" else s.view(torch.float8_e8m0fnu)
        return Done([q.view(torch.float8_e4m3fn), stored], report, [weight])

    return Item(source.tensors[name].shard, specs, run)


def plan_fp8(source: Source, scale: fp8_block.ScaleKind, scope: Fp8Scope, ignore: Ignore) -> Plan:
    routed = Scope(ignore)

    def chosen(name: str) -> bool:
        inside = name in routed if scope == "experts" else is_linear_weight(name) and not ignore.matches(name)
        return inside and len(source.tensors[name].spec.shape) == 2

    names = _selected(source, chosen, 1)
    taken = set(names)
    items = [_fp8_item(source, n, scale) for n in names] + keep(source, (n for n in source.tensors if n not in taken))
    contract = QuantContract(
        format="fp8_block",
        block=(128, 128),
        scale_dtype=scale,
        decode="exact",
        tensors=tuple(sorted(names)),
        scope_digest=scope_digest(names),
        gate_up_shared=False,
        ignore=ignore.compact(),
        source_digest=source.digest,
        producer=producer("bf16-to-fp8"),
        lossless=False,
    )
    excluded = compact_excludes((n for n in source.tensors if n not in taken), names)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(excluded),
        **({"scale_fmt": "ue8m0"} if scale == "e8m0" else {}),
    }
    options = {"scale": scale, "scope": scope, "ignore": list(ignore.compact())}
    return Plan("bf16-to-fp8", options, items, contract, {**source.config, "quantization_config": quantization})


def to_fp8(
    source: Path,
    target: Path,
    *,
    scale: fp8_block.ScaleKind = "fp32",
    scope: Fp8Scope = "linears",
    ignore: Sequence[str] = (),
    resume: bool = False,
) -> dict:
    """2-D projections (or routed experts only) to FP8 with `weight_scale_inv`. Returns the report."""
    opened = Source(source)
    return execute(opened, target, plan_fp8(opened, scale, scope, Ignore(tuple(ignore))), resume=resume)
