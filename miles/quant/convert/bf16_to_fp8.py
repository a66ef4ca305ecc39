"""bf16 (fp16, fp32) checkpoints to FP8 E4M3 with 128x128 scales: all 2-D projections, or routed experts only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from miles.quant.codecs import fp8_block
from miles.quant.codecs.checks import check_rounded
from miles.quant.contract import QuantContract, scope_digest
from miles.quant.convert.leftovers import quantised_left
from miles.quant.convert.planning import compact_excludes, ignore_of, keep, producer, refuse
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.scope import Ignore, Scope

FLOATS = ("BF16", "F16", "F32")
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123]|\.q_[ab]_proj|\.kv_[ab]_proj)\.weight$")
Fp8Scope = Literal["experts", "linears"]


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
        back = check_rounded(fp8_block.dequantize(q, s, torch.float32), name)
        report.max_abs_error = float((back - weight.float()).abs().max())
        stored = s if scale == "fp32" else s.view(torch.float8_e8m0fnu)
        return Done([q.view(torch.float8_e4m3fn), stored], report, [weight])

    return Item(source.tensors[name].shard, specs, run)


def _chosen(source: Source, scope: Fp8Scope, ignore: Ignore) -> list[str]:
    routed = Scope(ignore)
    names = [
        name
        for name, stored in source.tensors.items()
        if (name in routed if scope == "experts" else is_linear_weight(name) and not ignore.matches(name))
        and len(stored.spec.shape) == 2
    ]
    faults = []
    for name in names:
        spec = source.tensors[name].spec
        if spec.dtype not in FLOATS:
            faults.append(f"{name}: dtype {spec.dtype}, bf16-to-fp8 reads {', '.join(FLOATS)}")
        elif 0 in spec.shape:
            faults.append(f"{name}: shape {list(spec.shape)} has no elements")
    chosen = set(names)
    faults += quantised_left(
        source,
        (n for n in source.tensors if n not in chosen),
        reads=f"bf16-to-fp8 reads {', '.join(FLOATS)}; for a quantised checkpoint use `miles convert requantise`",
        written={f"{n}_scale_inv" for n in names},
    )
    if not names:
        faults.append(f"no 2-D weight in scope {scope}")
    refuse(source, faults)
    return names


def plan(source: Source, scale: fp8_block.ScaleKind, scope: Fp8Scope, ignore: Ignore) -> Plan:
    """Scan and lay out the output; raises before anything is written."""
    names = _chosen(source, scope, ignore)
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


def convert(
    source: Path,
    target: Path,
    *,
    scale: fp8_block.ScaleKind = "fp32",
    scope: Fp8Scope = "linears",
    ignore: Sequence[str] = (),
    resume: bool = False,
) -> dict:
    """2-D projections (or routed experts only) to FP8 with `weight_scale_inv`. Returns the report."""
    return execute(source, target, lambda opened: plan(opened, scale, scope, ignore_of(opened, ignore)), resume=resume)
