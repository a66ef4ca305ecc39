"""MXFP4 checkpoints to FP8 with 128x128 power-of-two scales, with proof of what was lost. Integer arithmetic only.

First the headers (no FP4 tensor, stray scales, dtype and shape faults), then the scales: a tile whose scale codes
differ by at most eight is lossless whatever its elements are; only weights with a wider tile are read to find out.
So every refusal comes before the first byte is written. FP8 weights in smaller blocks that stand beside the FP4 ones
become 128x128 too, see `fp8_beside`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from miles.kernels.formats import e2m1_decode, e4m3_decode, e8m0_decode, unpack_e2m1
from miles.kernels.mxfp4_to_fp8 import reference
from miles.kernels.mxfp4_to_fp8.reference import BLOCK, TILE, Converted
from miles.quant.contract import QuantContract, scope_digest
from miles.quant.convert import fp8_beside
from miles.quant.convert.fp4_weights import Weight, scan_headers
from miles.quant.convert.fp8_beside import BesideWeight
from miles.quant.convert.planning import LISTED, compact_excludes, keep, producer, refuse
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.errors import ConversionError

OnLoss = Literal["fail", "mxfp8", "report"]
_MXFP8_CODES = torch.tensor([0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], dtype=torch.uint8)  # E4M3 of 0 .. 6


def lossy_tiles(source: Source, weight: Weight) -> list[tuple[int, int, int, int]]:
    """(tile row, tile column, max k, lossy elements) of each tile that would round. Reads the weight only if needed.

    ValueError names a scale that is no number.
    """
    scale = source.load(weight.scale).view(torch.uint8)
    everywhere = torch.ones(scale.shape, dtype=torch.bool)
    _, worst = reference.tile_codes(scale, everywhere)
    # c_max over occupied blocks is at most that over all blocks, so k is at most `worst` where all blocks count.
    if int(worst.max()) <= 14:
        return []
    result = reference.convert(source.load(weight.name), scale)
    return [(r, c, int(result.max_k[r, c]), int(result.lossy[r, c])) for r, c in result.lossy.nonzero().tolist()]


def _exact_mxfp8(packed: torch.Tensor) -> torch.Tensor:
    """E4M3 codes with the same 1x32 scale bytes: every E2M1 value is an E4M3 value."""
    code = unpack_e2m1(packed)
    return _MXFP8_CODES[(code & 7).long()] | ((code & 8) << 4)


def max_abs_error(packed: torch.Tensor, scale: torch.Tensor, result: Converted) -> float:
    """Largest |converted - original| over the lossy tiles, exact in fp64."""
    worst = 0.0
    for r, c in result.lossy.nonzero().tolist():
        rows, cols = slice(r * TILE, (r + 1) * TILE), slice(c * TILE, (c + 1) * TILE)
        codes = unpack_e2m1(packed[rows, c * TILE // 2 : (c + 1) * TILE // 2])
        factor = e8m0_decode(scale[rows, c * TILE // BLOCK : (c + 1) * TILE // BLOCK]).double()
        original = e2m1_decode(codes).double() * factor.repeat_interleave(BLOCK, 1)
        back = e4m3_decode(result.q[rows, cols]).double() * float(e8m0_decode(result.scale[r : r + 1, c]).double())
        worst = max(worst, float((back - original).abs().max()))
    return worst


def check_device(device: str) -> None:
    """`cpu`, or a CUDA device of this machine."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise ConversionError(f"--device {device}: no such device; use cpu or cuda") from None
    if kind.type not in ("cpu", "cuda"):
        raise ConversionError(f"--device {device}: conversions run on cpu or cuda only; use cpu or cuda")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise ConversionError(
            f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu (same bytes)"
        )


def _convert_on(device: str, packed: torch.Tensor, scale: torch.Tensor) -> Converted:
    if device == "cpu":
        return reference.convert(packed, scale)
    from miles.kernels.mxfp4_to_fp8.api import mxfp4_to_fp8

    r = mxfp4_to_fp8([packed.to(device)], [scale.to(device)])[0]
    return Converted(r.q.cpu(), r.scale.cpu(), r.max_k.cpu(), r.lossy.cpu())


def _item(source: Source, w: Weight, as_mxfp8: bool, device: str) -> Item:
    shard = source.tensors[w.name].shard
    scale_shape = (w.rows, w.cols // BLOCK) if as_mxfp8 else w.tiles
    specs = (TensorSpec(w.out, "F8_E4M3", (w.rows, w.cols)), TensorSpec(w.out_scale, "F8_E8M0", scale_shape))

    def run() -> Done:
        packed, scale = source.load(w.name).view(torch.uint8), source.load(w.scale).view(torch.uint8)
        action = "mxfp8" if as_mxfp8 else "fp8_128x128"
        report = TensorReport(w.out, action, tiles=w.tiles[0] * w.tiles[1], lossy_tiles=0, lossy_elements=0)
        if as_mxfp8:
            q, out_scale = _exact_mxfp8(packed), scale
        else:
            result = _convert_on(device, packed, scale)
            q, out_scale = result.q, result.scale
            report.max_k = int(result.max_k.max())
            report.lossy_tiles = int((result.lossy > 0).sum())
            report.lossy_elements = int(result.lossy.sum())
            if report.lossy_tiles:
                report.max_abs_error = max_abs_error(packed, scale, result)
        return Done([q.view(torch.float8_e4m3fn), out_scale.view(torch.float8_e8m0fnu)], report, [packed, scale])

    return Item(shard, specs, run)


def without_expert_dtype(config: dict) -> dict:
    """A config without `expert_dtype` on the top and on the text level."""
    config = {k: v for k, v in config.items() if k != "expert_dtype"}
    for key in ("text_config", "quantization_config"):
        if isinstance(config.get(key), dict):
            config[key] = {k: v for k, v in config[key].items() if k != "expert_dtype"}
    return config


def _refuse_loss(lossy: dict[str, list[str]]) -> None:
    lines = [f"{name} {tile}" for name, tiles in lossy.items() for tile in tiles]
    more = f"\n  ... {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    raise ConversionError(
        f"{len(lines)} tiles in {len(lossy)} weights would round (nothing was written):\n  "
        + "\n  ".join(lines[:LISTED])
        + more
        + "\nuse --on-loss mxfp8 to keep these weights exact, or --on-loss report to accept the loss"
    )


def _lossy(
    source: Source, weights: list[Weight], beside: list[BesideWeight], faults: list[str]
) -> dict[str, list[str]]:
    """By the result's name of each weight that would round: its lossy tiles in words."""
    lossy = {}
    for w in weights:
        try:
            if tiles := lossy_tiles(source, w):
                lossy[w.out] = [f"tile [{r}, {c}]: k={k}, {count} elements" for r, c, k, count in tiles]
        except ValueError as error:
            faults.append(f"{w.scale}: {error}")
    for b in beside:
        try:
            if merged := fp8_beside.lossy_tiles(source, b):
                lossy[b.name] = [f"tile [{r}, {c}]: {count} elements" for r, c, count in merged]
        except ValueError as error:
            faults.append(str(error))
    return lossy


def plan(source: Source, *, on_loss: OnLoss, device: str = "cpu") -> Plan:
    """Scan, decide, and lay out the output; raises before anything is written."""
    weights, beside, faults = scan_headers(source)
    lossy = _lossy(source, weights, beside, faults)
    refuse(source, faults)
    if lossy and on_loss == "fail":
        _refuse_loss(lossy)
    exact = set(lossy) if on_loss == "mxfp8" else set()
    taken = {n for w in weights for n in (w.name, w.scale)} | {n for b in beside for n in (b.name, b.scale)}
    kept = [n for n in source.tensors if n not in taken]
    items = [_item(source, w, w.out in exact, device) for w in weights]
    items += [fp8_beside.item(source, b, as_mxfp8=b.name in exact) for b in beside]
    items += keep(source, kept)
    tables = [b.name for b in beside if b.is_table]
    names = sorted([w.out for w in weights] + [b.name for b in beside if not b.is_table])
    contract = QuantContract(
        format="mixed_fp8" if exact else "fp8_block",
        block=(TILE, TILE),
        scale_dtype="e8m0",
        decode="exact",
        tensors=tuple(names),
        scope_digest=scope_digest(names),
        gate_up_shared=False,
        source_digest=source.digest,
        producer=producer("mxfp4-to-fp8"),
        lossless=not lossy or on_loss == "mxfp8",
        exceptions=dict.fromkeys(sorted(exact), "mxfp8 1x32"),
    )
    stated = source.quantization
    if stated.get("quant_method") == "compressed-tensors":
        # Its groups and patterns describe what is no longer there.
        plain = [n for n in kept if source.tensors[n].spec.dtype != "F8_E4M3"] + tables
        stated = {"modules_to_not_convert": compact_excludes(plain, names)}
    config = without_expert_dtype({**source.config, "quantization_config": stated})
    config["quantization_config"] = {
        **config["quantization_config"],
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [TILE, TILE],
        # No common reader knows a mix: it stops at these scales' shape. Ours goes by the contract's exceptions.
        **({"mxfp8_modules": [name.removesuffix(".weight") for name in sorted(exact)]} if exact else {}),
    }
    return Plan("mxfp4-to-fp8", {"on_loss": on_loss}, items, contract, config)


def convert(source: Path, target: Path, *, on_loss: OnLoss = "fail", resume: bool = False, device: str = "cpu") -> dict:
    """Convert the checkpoint in `source` into `target`; returns the report that `report.json` holds."""
    check_device(device)
    return execute(source, target, lambda opened: plan(opened, on_loss=on_loss, device=device), resume=resume)
