"""The MXFP4 weights of a checkpoint: which tensors they are, in the layouts that store a weight and its scale apart.

`*.weight` as bytes (U8, I8) or as safetensors F4, with `*.scale`, `*.weight_scale` or `*.weight_scale_inv`; and
compressed-tensors' `*.weight_packed` with `*.weight_scale`. Bytes hold the even column in their low half.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles.kernels.mxfp4_to_fp8.reference import BLOCK, TILE
from miles.quant.convert import fp8_beside
from miles.quant.convert.fp8_beside import SCALE_SUFFIXES, BesideWeight
from miles.quant.convert.layouts import layout_of
from miles.quant.convert.leftovers import quantised_left
from miles.quant.convert.shards import FOUR_BITS, Source, TensorSpec

READS = (
    "mxfp4-to-fp8 reads FP4 `*.weight` (U8, I8, F4) or `*.weight_packed` with an e8m0 scale, and FP8 with power-of-two "
    "scales of 128x128, 32x32 or 1x32"
)
_PACKED = ".weight_packed"
_BYTES = ("U8", "I8")


@dataclass(frozen=True)
class Weight:
    """An FP4 weight of the source and its scale, which may live in another shard; `out`, `out_scale`: the result's names."""

    name: str
    scale: str
    rows: int
    cols: int
    out: str
    out_scale: str

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.rows // TILE), -(-self.cols // TILE)


def scan_headers(source: Source) -> tuple[list[Weight], list[BesideWeight], list[str]]:
    """FP4 weights with their scales, FP8 weights in smaller blocks, and every fault of headers and FP8 scales."""
    weights: list[Weight] = []
    faults: list[str] = []
    used: set[str] = set()
    for name, stored in source.tensors.items():
        if not _is_fp4(name, stored.spec):
            continue
        stem = name.removesuffix(_PACKED) + "." if name.endswith(_PACKED) else name[: -len("weight")]
        suffixes = ("weight_scale",) if name.endswith(_PACKED) else SCALE_SUFFIXES
        scales = [stem + s for s in suffixes if stem + s in source.tensors]
        used.update((name, *scales))
        if stem + "weight_global_scale" in source.tensors:
            faults.append(f"{name}: {layout_of(source, name) or 'NVFP4'} is not MXFP4; it has a second scale")
        elif len(scales) != 1:
            faults.append(f"{name}: needs exactly one scale ({', '.join(suffixes)}), found {scales or 'none'}")
        else:
            weight = _checked(source, name, stem, scales[0], faults)
            if weight is not None:
                weights.append(weight)
    if not used:
        faults.append("no FP4 weight (U8, I8 or F4 `*.weight`, or `*.weight_packed`, with an e8m0 scale)")
    for name in source.tensors:
        owner = next((name[: -len(s)] + "weight" for s in SCALE_SUFFIXES if name.endswith("." + s)), None)
        if owner is not None and owner not in source.tensors and owner + "_packed" not in source.tensors:
            faults.append(f"{name}: stray scale, {owner} is not in the checkpoint")
            used.add(name)
    beside, fitting, wrong = fp8_beside.scan(source)
    faults += wrong
    used |= fitting
    faults += quantised_left(source, (n for n in source.tensors if n not in used), reads=READS)
    return weights, beside, faults


def _is_fp4(name: str, spec: TensorSpec) -> bool:
    if name.endswith(_PACKED):
        return spec.dtype in _BYTES
    return name.endswith(".weight") and spec.dtype in (*_BYTES, FOUR_BITS)


def _checked(source: Source, name: str, stem: str, scale_name: str, faults: list[str]) -> Weight | None:
    spec, scale = source.tensors[name].spec, source.tensors[scale_name].spec
    in_a_byte = 1 if spec.dtype == FOUR_BITS else 2
    if len(spec.shape) != 2 or spec.shape[1] * in_a_byte % BLOCK or 0 in spec.shape:
        form = "[out, in]" if in_a_byte == 1 else "[out, in/2]"
        faults.append(f"{name}: shape {list(spec.shape)} is not {form} with in a multiple of {BLOCK}")
        return None
    rows, cols = spec.shape[0], spec.shape[1] * in_a_byte
    if scale.dtype not in ("U8", "F8_E8M0"):
        faults.append(f"{scale_name}: dtype {scale.dtype}, an e8m0 scale is U8 or F8_E8M0")
        return None
    if scale.shape != (rows, cols // BLOCK):
        faults.append(f"{scale_name}: shape {list(scale.shape)}, {name} needs {[rows, cols // BLOCK]}")
        return None
    return Weight(name, scale_name, rows, cols, stem + "weight", scale_name)
