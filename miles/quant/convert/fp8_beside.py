"""FP8 weights that stand beside MXFP4 ones: in 128x128 tiles they stay, in 32x32 or 1x32 blocks they are merged.

Embedding tables, which no reader takes as FP8, become bf16, which holds every such value exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.quant.codecs.fp8_block import TILE
from miles.quant.convert import fp8_merge
from miles.quant.convert.fp8_merge import BF16_CODES, BLOCK
from miles.quant.convert.fp8_to_mxfp8 import scale_bytes, scale_fault
from miles.quant.convert.run import Done, Item, TensorReport
from miles.quant.convert.shards import Source, TensorSpec

SCALE_SUFFIXES = ("scale", "weight_scale", "weight_scale_inv")
_SCALE_DTYPES = ("U8", "F8_E8M0", "F32")
_TABLES = frozenset({"embed_tokens", "embed", "embedding", "embeddings", "word_embeddings", "tok_embeddings", "wte"})


@dataclass(frozen=True)
class BesideWeight:
    """An FP8 weight [rows, cols] with a scale for each block of `block_rows` x 32."""

    name: str
    scale: str
    rows: int
    cols: int
    block_rows: int

    @property
    def is_table(self) -> bool:
        return self.name.removesuffix(".weight").rpartition(".")[2] in _TABLES

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.rows // TILE), -(-self.cols // TILE)


def scan(source: Source) -> tuple[list[BesideWeight], set[str], list[str]]:
    """(weights to merge, names that need no more attention, faults of headers and scales)."""
    weights: list[BesideWeight] = []
    names: set[str] = set()
    faults: list[str] = []
    for name, stored in source.tensors.items():
        spec = stored.spec
        if spec.dtype != "F8_E4M3" or not name.endswith(".weight") or len(spec.shape) != 2 or 0 in spec.shape:
            continue
        scales = [n for s in SCALE_SUFFIXES if (n := name[: -len("weight")] + s) in source.tensors]
        if len(scales) != 1 or source.tensors[scales[0]].spec.dtype not in _SCALE_DTYPES:
            continue
        (scale,), got, (rows, cols) = scales, source.tensors[scales[0]].spec.shape, spec.shape
        if got == (-(-rows // TILE), -(-cols // TILE)):
            block_rows = TILE
        elif got in ((-(-rows // BLOCK), -(-cols // BLOCK)), (rows, -(-cols // BLOCK))):
            block_rows = 1 if got[0] == rows else BLOCK
        else:
            continue
        names.update((name, scale))
        fault = scale_fault(source.load(scale), scale)
        if fault is not None:
            faults.append(fault)
        elif block_rows != TILE and cols % BLOCK:
            faults.append(
                f"{name}: shape {list(spec.shape)} with 32-wide blocks needs columns in a multiple of {BLOCK}"
            )
        elif block_rows != TILE:
            weight = BesideWeight(name, scale, rows, cols, block_rows)
            weights.append(weight)
            if weight.is_table and (fault := _beyond_bf16(source, weight)) is not None:
                faults.append(fault)
    return weights, names, faults


def _beyond_bf16(source: Source, weight: BesideWeight) -> str | None:
    code = _codes(source, weight)
    low, high = BF16_CODES
    bad = (code < low) | (code > high)
    if not bool(bad.any()):
        return None
    place = [int(i) for i in bad.nonzero()[0]]
    return (
        f"{weight.scale}: scale code {int(code[tuple(place)])} at {place}: the table has values that bf16 does not hold"
    )


def _codes(source: Source, weight: BesideWeight) -> torch.Tensor:
    return scale_bytes(source.load(weight.scale))


def _merged(source: Source, weight: BesideWeight) -> fp8_merge.Merged:
    codes = source.load(weight.name).view(torch.uint8)
    return fp8_merge.merge(codes, _codes(source, weight), weight.block_rows, name=weight.name)


def lossy_tiles(source: Source, weight: BesideWeight) -> list[tuple[int, int, int]]:
    """(tile row, tile column, lossy elements) of each tile that would round; ValueError names a value that is NaN."""
    if weight.is_table:
        return []
    lossy = _merged(source, weight).lossy
    return [(r, c, int(lossy[r, c])) for r, c in lossy.nonzero().tolist()]


def item(source: Source, weight: BesideWeight, *, as_mxfp8: bool) -> Item:
    """What becomes of one weight: bf16 for a table, else 128x128 tiles, or 1x32 blocks (`as_mxfp8`, always exact)."""
    shard, shape = source.tensors[weight.name].shard, (weight.rows, weight.cols)
    if weight.is_table:
        return Item(shard, (TensorSpec(weight.name, "BF16", shape),), lambda: _as_bf16(source, weight))
    scale_shape = (weight.rows, weight.cols // BLOCK) if as_mxfp8 else weight.tiles
    specs = (TensorSpec(weight.name, "F8_E4M3", shape), TensorSpec(weight.scale, "F8_E8M0", scale_shape))
    return Item(shard, specs, lambda: _as_fp8(source, weight, as_mxfp8=as_mxfp8))


def _as_bf16(source: Source, weight: BesideWeight) -> Done:
    stored, scale = source.load(weight.name), source.load(weight.scale)
    exact = fp8_merge.values(stored.view(torch.uint8), scale_bytes(scale), weight.block_rows, name=weight.name)
    report = TensorReport(weight.name, "bf16", tiles=0, lossy_tiles=0, lossy_elements=0)
    return Done([exact.to(torch.bfloat16)], report, [stored, scale])


def _as_fp8(source: Source, weight: BesideWeight, *, as_mxfp8: bool) -> Done:
    stored, scale = source.load(weight.name), source.load(weight.scale)
    tiles = weight.tiles[0] * weight.tiles[1]
    if as_mxfp8:
        fp8_merge.values(stored.view(torch.uint8), scale_bytes(scale), weight.block_rows, name=weight.name)
        code = fp8_merge.repeat_rows(scale_bytes(scale), weight.rows, weight.block_rows)
        report = TensorReport(weight.name, "mxfp8", tiles=tiles, lossy_tiles=0, lossy_elements=0)
        return Done([stored, code.view(torch.float8_e8m0fnu)], report, [stored, scale])
    result = _merged(source, weight)
    report = TensorReport(
        weight.name,
        "fp8_128x128",
        tiles=tiles,
        lossy_tiles=int((result.lossy > 0).sum()),
        lossy_elements=int(result.lossy.sum()),
        max_abs_error=result.max_abs_error,
    )
    q, out_scale = result.q.view(torch.float8_e4m3fn), result.scale.view(torch.float8_e8m0fnu)
    return Done([q, out_scale], report, [stored, scale])
