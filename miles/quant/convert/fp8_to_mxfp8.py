"""FP8 with 128x128 power-of-two scales to MXFP8 (1x32 e8m0 scales): exact, the element bytes do not change.

An fp32 scale is accepted only where every entry is a power of two that e8m0 holds; any other is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch

from miles.kernels.formats import e8m0_decode, e8m0_encode
from miles.quant.codecs.fp8_block import TILE
from miles.quant.contract import QuantContract, scope_digest
from miles.quant.convert.leftovers import quantised_left
from miles.quant.convert.planning import keep, producer, refuse
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec

BLOCK = 32
SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
READS = "fp8-to-mxfp8 reads F8_E4M3 `*.weight` with a 128x128 scale"


def scale_fault(scale: torch.Tensor, name: str) -> str | None:
    """What is wrong with a tile scale: a NaN, or an fp32 scale that is not a power of two."""
    if scale.dtype != torch.float32:
        bad = scale.view(torch.uint8) == 255
        if not bool(bad.any()):
            return None
        r, c = (int(i) for i in bad.nonzero()[0])
        return f"{name}: scale code 255 (NaN) in tile [{r}, {c}]; that weight is damaged"
    wrong = (e8m0_decode(e8m0_encode(scale)) != scale) | (scale <= 0)
    if not bool(wrong.any()):
        return None
    r, c = (int(i) for i in wrong.nonzero()[0])
    return (
        f"{name}: scale {float(scale[r, c])!r} of tile [{r}, {c}] is not a power of two, so a conversion would round. "
        "Quantise the bf16 checkpoint with `miles convert bf16-to-fp8 --scale e8m0` instead"
    )


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 codes (uint8) of a tile scale without a fault."""
    return e8m0_encode(scale) if scale.dtype == torch.float32 else scale.view(torch.uint8)


def repeat_scale(code: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[ceil(M/128), ceil(N/128)] -> [M, N/32]: the byte of a tile for each of its blocks."""
    return code.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE // BLOCK, 1)[:, : cols // BLOCK].contiguous()


def _weights(source: Source) -> list[tuple[str, str]]:
    """FP8 weights and their scales; ConversionError lists every fault of headers and scales."""
    pairs, faults, seen = [], [], set()
    for name, stored in source.tensors.items():
        spec = stored.spec
        if spec.dtype != "F8_E4M3" or not name.endswith(".weight"):
            continue
        seen.add(name)
        stem = name[: -len("weight")]
        scale = next((stem + s for s in SUFFIXES if stem + s in source.tensors), None)
        if scale is None:
            faults.append(f"{name}: no scale ({', '.join(SUFFIXES)})")
            continue
        seen.add(scale)
        got = source.tensors[scale].spec
        grid = tuple(-(-size // TILE) for size in spec.shape)
        if len(spec.shape) != 2 or spec.shape[1] % BLOCK or 0 in spec.shape:
            faults.append(f"{name}: shape {list(spec.shape)} is not [M, N] with N a multiple of {BLOCK}")
        elif got.shape != grid or got.dtype not in ("F32", "U8", "F8_E8M0"):
            faults.append(f"{scale}: {got.dtype} {list(got.shape)}, {name} needs {list(grid)} in F32, U8 or F8_E8M0")
        elif (fault := scale_fault(source.load(scale), scale)) is not None:
            faults.append(fault)
        else:
            pairs.append((name, scale))
    faults += quantised_left(source, (n for n in source.tensors if n not in seen), reads=READS)
    if not seen:
        faults.append("no FP8 weight (F8_E4M3 `*.weight` with a 128x128 scale)")
    refuse(source, faults)
    return pairs


def _item(source: Source, name: str, scale: str) -> Item:
    rows, cols = source.tensors[name].spec.shape
    specs = (TensorSpec(name, "F8_E4M3", (rows, cols)), TensorSpec(scale, "F8_E8M0", (rows, cols // BLOCK)))

    def run() -> Done:
        weight, tile_scale = source.load(name), source.load(scale)
        report = TensorReport(name, "mxfp8", tiles=tile_scale.numel(), lossy_tiles=0, lossy_elements=0)
        bad = (weight.view(torch.uint8) & 0x7F) == 0x7F
        if bool(bad.any()):
            raise ValueError(f"{name}: nan at index {[int(i) for i in bad.nonzero()[0]]}")
        code = repeat_scale(scale_bytes(tile_scale), rows, cols)
        return Done([weight, code.view(torch.float8_e8m0fnu)], report, [weight, tile_scale])

    return Item(source.tensors[name].shard, specs, run)


def plan(source: Source) -> Plan:
    """Scan and lay out the output; raises before anything is written."""
    pairs = _weights(source)
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
    quantization = {**source.quantization, "quant_method": "mxfp8", "scale_fmt": "ue8m0"}
    quantization["weight_block_size"] = [1, BLOCK]
    return Plan("fp8-to-mxfp8", {}, items, contract, {**source.config, "quantization_config": quantization})


def convert(source: Path, target: Path, *, resume: bool = False) -> dict:
    """Convert `source` into `target`; returns the report."""
    return execute(source, target, plan, resume=resume)
