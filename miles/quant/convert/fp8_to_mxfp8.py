"""FP8 with 128x128 power-of-two scales to MXFP8 (1x32 e8m0 scales): exact, the element bytes do not change.

An fp32 scale is accepted only where every entry is a power of two that e8m0 holds; any other is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch

from miles.kernels.formats import e8m0_decode, e8m0_encode
from miles.quant.codecs.fp8_block import TILE
from miles.quant.contract import QuantContract, scope_digest
from miles.quant.convert.planning import keep, producer, refuse
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.errors import ConversionError

BLOCK = 32
SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")


def scale_bytes(scale: torch.Tensor, name: str) -> torch.Tensor:
    """e8m0 codes (uint8) of a tile scale; ConversionError on NaN, or where an fp32 scale is not a power of two."""
    if scale.dtype != torch.float32:
        code = scale.view(torch.uint8)
        if bool((code == 255).any()):
            r, c = (int(i) for i in (code == 255).nonzero()[0])
            raise ConversionError(f"{name}: scale code 255 (NaN) in tile [{r}, {c}]; that weight is damaged")
        return code
    code = e8m0_encode(scale)
    wrong = (e8m0_decode(code) != scale) | (scale <= 0)
    if bool(wrong.any()):
        r, c = (int(i) for i in wrong.nonzero()[0])
        raise ConversionError(
            f"{name}: scale {float(scale[r, c])!r} of tile [{r}, {c}] is not a power of two, so MXFP8 would round. "
            "Quantise the bf16 checkpoint with `miles convert bf16-to-fp8 --scale e8m0` instead"
        )
    return code


def repeat_scale(code: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[ceil(M/128), ceil(N/128)] -> [M, N/32]: the byte of a tile for each of its blocks."""
    return code.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE // BLOCK, 1)[:, : cols // BLOCK].contiguous()


def _weights(source: Source) -> list[tuple[str, str]]:
    pairs, faults = [], []
    for name, stored in source.tensors.items():
        spec = stored.spec
        if spec.dtype != "F8_E4M3" or not name.endswith(".weight"):
            continue
        stem = name[: -len("weight")]
        scale = next((stem + s for s in SUFFIXES if stem + s in source.tensors), None)
        if scale is None:
            faults.append(f"{name}: no scale ({', '.join(SUFFIXES)})")
            continue
        got = source.tensors[scale].spec
        grid = tuple(-(-size // TILE) for size in spec.shape)
        if len(spec.shape) != 2 or spec.shape[1] % BLOCK:
            faults.append(f"{name}: shape {list(spec.shape)} is not [M, N] with N a multiple of {BLOCK}")
        elif got.shape != grid or got.dtype not in ("F32", "U8", "F8_E8M0"):
            faults.append(f"{scale}: {got.dtype} {list(got.shape)}, {name} needs {list(grid)} in F32, U8 or F8_E8M0")
        else:
            pairs.append((name, scale))
    if not faults and not pairs:
        faults.append("no FP8 weight (F8_E4M3 `*.weight` with a 128x128 scale)")
    refuse(source, faults)
    return pairs


def _item(source: Source, name: str, scale: str) -> Item:
    rows, cols = source.tensors[name].spec.shape
    specs = (TensorSpec(name, "F8_E4M3", (rows, cols)), TensorSpec(scale, "F8_E8M0", (rows, cols // BLOCK)))

    def run() -> Done:
        weight, tile_scale = source.load(name), source.load(scale)
        report = TensorReport(name, "mxfp8", tiles=tile_scale.numel(), lossy_tiles=0, lossy_elements=0)
        code = repeat_scale(scale_bytes(tile_scale, scale), rows, cols)
        return Done([weight, code.view(torch.float8_e8m0fnu)], report, [weight, tile_scale])

    return Item(source.tensors[name].shard, specs, run)


def plan(source: Source) -> Plan:
    """Every scale is checked here, before anything is written."""
    pairs = _weights(source)
    for _, scale in pairs:
        scale_bytes(source.load(scale), scale)
    taken = {n for pair in pairs for n in pair}
    items = [_item(source, *pair) for pair in pairs] + keep(source, (n for n in source.tensors if n not in taken))
    names = [name for name, _ in pairs]
    contract = QuantContract(
        format="mxfp8",
        block=(1, BLOCK),
        scale_dtype="e8m0",
        decode="exact",
        tensors=tuple(sorted(names)),
        scope_digest=scope_digest(names),
        gate_up_shared=False,
        source_digest=source.digest,
        producer=producer("fp8-to-mxfp8"),
        lossless=True,
    )
    quantization = {**source.config.get("quantization_config", {}), "quant_method": "mxfp8", "scale_fmt": "ue8m0"}
    quantization["weight_block_size"] = [1, BLOCK]
    return Plan("fp8-to-mxfp8", {}, items, contract, {**source.config, "quantization_config": quantization})


def convert(source: Path, target: Path, *, resume: bool = False) -> dict:
    """Convert `source` into `target`; returns the report."""
    return execute(source, target, plan, resume=resume)
