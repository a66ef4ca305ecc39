"""Weights that a checkpoint holds quantised, as converters read them: decoded to bf16.

Known forms: NVFP4, MXFP4, MXFP8, FP8 in 128x128 tiles, FP8 with one scale. Headers decide which it is; a weight whose
scale fits none of them is left to the caller, which refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8, nvfp4
from miles.quant.codecs.checks import check_finite
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.packed import input_scale_name, stored_names

READS = "NVFP4 and FP8 128x128 with their scales, MXFP4, MXFP8, and FP8 with one scale"
BYTE_SCALES = ("F8_E4M3", "U8")
E8M0_SCALES = ("F8_E8M0", "U8")
TILE_SCALES = ("F32", *E8M0_SCALES)


@dataclass(frozen=True)
class Decoded:
    """A source weight as a conversion sees it: its unquantised shape, the tensors it is made of, and its decoder.

    `bad_scale` names the first scale that is NaN or infinite, with its index; it reads the scales only.
    """

    name: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...]
    decode: Callable[[], torch.Tensor]
    bad_scale: Callable[[], str | None]

    def load(self) -> torch.Tensor:
        """The weight in bf16; ValueError names the first value that is not finite."""
        weight = self.decode()
        check_finite(weight, self.name)
        return weight


def _misfit(
    source: Source, scale: str, weight: str, dtypes: tuple[str, ...], sizes: tuple[tuple[int, ...], ...]
) -> str:
    spec = source.tensors[scale].spec
    shapes = " or ".join(str(list(size)) for size in sizes)
    return (
        f"{scale} is {spec.dtype} {list(spec.shape)}, but {weight} needs {' or '.join(dtypes)} {shapes} "
        f"(in {source.tensors[scale].shard})"
    )


def _fits(spec: TensorSpec, dtypes: tuple[str, ...], *sizes: tuple[int, ...]) -> bool:
    return spec.dtype in dtypes and spec.shape in sizes


def _first_bad(source: Source, scale: str, kind: str) -> str | None:
    """The first scale that is not finite, read as fp32 values, e8m0 or E4M3 bytes."""
    values = source.load(scale)
    if kind == "F32":
        bad = ~values.isfinite()
    elif kind == "e8m0":
        bad = values.view(torch.uint8) == 255
    else:
        bad = (values.view(torch.uint8) & 0x7F) == 0x7F
    if not bool(bad.any()):
        return None
    index = tuple(int(i) for i in bad.nonzero()[0])
    value = float(values[index]) if kind == "F32" else "NaN"
    return f"{scale}: {value} at index {list(index)} (in {source.tensors[scale].shard}); that weight is damaged"


def _with_input_scale(source: Source, name: str, *inputs: str) -> tuple[str, ...]:
    """An activation's scale goes with its weight: beside bf16 weights it would mean nothing."""
    extra = input_scale_name(name)
    return (*inputs, extra) if extra in source.tensors else inputs


def _nvfp4(source: Source, name: str, faults: list[str]) -> Decoded | None:
    weight, scale, scale_2 = stored_names(name)
    spec = source.tensors[weight].spec
    if spec.dtype != "U8" or scale not in source.tensors or scale_2 not in source.tensors or len(spec.shape) < 2:
        return None
    shape = (*spec.shape[:-1], spec.shape[-1] * 2)
    groups = math.prod(shape[:-2])
    per_tensor = ((), (1,)) if len(shape) == 2 else ((groups,), (groups, 1), (groups, 1, 1))
    blocks = (*shape[:-1], shape[-1] // nvfp4.BLOCK)
    if not _fits(source.tensors[scale].spec, BYTE_SCALES, blocks):
        faults.append(_misfit(source, scale, name, BYTE_SCALES, (blocks,)))
    if not _fits(source.tensors[scale_2].spec, ("F32",), *per_tensor):
        faults.append(_misfit(source, scale_2, name, ("F32",), per_tensor))

    def decode() -> torch.Tensor:
        second = source.load(scale_2).reshape((-1, 1, 1) if len(shape) == 3 else (1,))
        packed = nvfp4.Packed(source.load(weight), source.load(scale).view(torch.uint8), second, second)
        return nvfp4.dequantize(packed, NVFP4QDQConfig(decode="stored"), torch.bfloat16)

    def bad_scale() -> str | None:
        return _first_bad(source, scale_2, "F32") or _first_bad(source, scale, "e4m3")

    return Decoded(name, shape, _with_input_scale(source, name, weight, scale, scale_2), decode, bad_scale)


def _only_scale(source: Source, name: str) -> str | None:
    """The one scale beside a `*.weight`, in any of the namings in use."""
    if not name.endswith(".weight"):
        return None
    names = (f"{name}_scale_inv", f"{name}_scale", name[: -len("weight")] + "scale")
    found = [n for n in names if n in source.tensors]
    return found[0] if len(found) == 1 and f"{name}_scale_2" not in source.tensors else None


def _mxfp4(source: Source, name: str, faults: list[str]) -> Decoded | None:
    spec, scale = source.tensors[name].spec, _only_scale(source, name)
    if scale is None or len(spec.shape) != 2:
        return None
    shape = (spec.shape[0], spec.shape[1] * 2)
    blocks = (shape[0], shape[1] // mxfp4.BLOCK)
    if shape[1] % mxfp4.BLOCK or not _fits(source.tensors[scale].spec, E8M0_SCALES, blocks):
        faults.append(_misfit(source, scale, name, E8M0_SCALES, (blocks,)))

    def decode() -> torch.Tensor:
        return mxfp4.dequantize(source.load(name).view(torch.uint8), source.load(scale).view(torch.uint8))

    inputs = _with_input_scale(source, name, name, scale)
    return Decoded(name, shape, inputs, decode, lambda: _first_bad(source, scale, "e8m0"))


def _fp8(source: Source, name: str, faults: list[str]) -> Decoded | None:
    spec, scale = source.tensors[name].spec, _only_scale(source, name)
    if scale is None:
        return None
    got = source.tensors[scale].spec
    grid = tuple(-(-size // fp8_block.TILE) for size in spec.shape)
    blocks = (*spec.shape[:-1], spec.shape[-1] // mxfp8.BLOCK) if spec.shape else ()

    dequantize: Callable[..., torch.Tensor] = fp8_block.dequantize
    if _fits(got, ("F32",), (), (1,)):
        dequantize = fp8_tensor.dequantize
    elif len(spec.shape) != 2:
        faults.append(f"{name}: shape {list(spec.shape)}; FP8 in tiles or blocks is defined for matrices")
    elif _fits(got, E8M0_SCALES, blocks) and spec.shape[-1] % mxfp8.BLOCK == 0:
        dequantize = mxfp8.dequantize
    elif not _fits(got, TILE_SCALES, grid):
        faults.append(_misfit(source, scale, name, TILE_SCALES, (grid,)) + f"; requantise reads {READS}")

    def decode() -> torch.Tensor:
        scales = source.load(scale)
        scales = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
        return dequantize(source.load(name).view(torch.uint8), scales)

    inputs = _with_input_scale(source, name, name, scale)
    kind = "F32" if got.dtype == "F32" else "e8m0"
    return Decoded(name, spec.shape, inputs, decode, lambda: _first_bad(source, scale, kind))


def decoded_weights(source: Source) -> tuple[dict[str, Decoded], list[str]]:
    """Every weight that the source holds in a known quantised form, by name; and all faults of their scales."""
    found: dict[str, Decoded] = {}
    faults: list[str] = []
    for name, stored in source.tensors.items():
        before = len(faults)
        decoded = None
        if stored.spec.dtype in ("U8", "I8"):
            decoded = _nvfp4(source, name, faults) or _mxfp4(source, name, faults)
        elif stored.spec.dtype == "F8_E4M3":
            decoded = _fp8(source, name, faults)
        if decoded is not None:
            found[name] = decoded
            if len(faults) == before and (bad := decoded.bad_scale()) is not None:
                faults.append(bad)
    return found, faults
