"""Weights that a checkpoint holds quantised (NVFP4, FP8 in 128x128 tiles), as converters read them: decoded to bf16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import fp8_block, nvfp4
from miles.quant.convert.shards import Source
from miles.quant.errors import ConversionError
from miles.quant.packed import stored_names

BYTE_SCALES = ("F8_E4M3", "U8")
TILE_SCALES = ("F32", "F8_E8M0", "U8")


@dataclass(frozen=True)
class Decoded:
    """A source weight as a conversion sees it: its unquantised shape, the tensors it is made of, and its decoder."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...]
    load: Callable[[], torch.Tensor]


def _check(source: Source, name: str, dtypes: tuple[str, ...], sizes: tuple[tuple[int, ...], ...], weight: str) -> None:
    spec = source.tensors[name].spec
    if spec.dtype not in dtypes or spec.shape not in sizes:
        shapes = " or ".join(str(list(size)) for size in sizes)
        raise ConversionError(
            f"{source.directory / source.tensors[name].shard}: {name} is {spec.dtype} {list(spec.shape)}, but {weight} needs "
            f"{' or '.join(dtypes)} {shapes}"
        )


def _nvfp4(source: Source, name: str) -> Decoded | None:
    weight, scale, scale_2 = stored_names(name)
    spec = source.tensors[weight].spec
    if spec.dtype != "U8" or scale not in source.tensors or scale_2 not in source.tensors:
        return None
    shape = (*spec.shape[:-1], spec.shape[-1] * 2)
    groups = math.prod(shape[:-2])
    per_tensor = ((), (1,)) if len(shape) == 2 else ((groups,), (groups, 1), (groups, 1, 1))
    _check(source, scale, BYTE_SCALES, ((*shape[:-1], shape[-1] // nvfp4.BLOCK),), name)
    _check(source, scale_2, ("F32",), per_tensor, name)

    def load() -> torch.Tensor:
        second = source.load(scale_2).reshape((-1, 1, 1) if len(shape) == 3 else (1,))
        packed = nvfp4.Packed(source.load(weight), source.load(scale).view(torch.uint8), second, second)
        return nvfp4.dequantize(packed, NVFP4QDQConfig(decode="stored"), torch.bfloat16)

    extra = [n for n in (scale_2.replace("weight_scale_2", "input_scale"),) if n in source.tensors and n != scale_2]
    return Decoded(name, shape, (weight, scale, scale_2, *extra), load)


def _fp8(source: Source, name: str) -> Decoded | None:
    spec = source.tensors[name].spec
    scale = f"{name}_scale_inv"
    if spec.dtype != "F8_E4M3" or scale not in source.tensors:
        return None
    if len(spec.shape) != 2:
        raise ConversionError(f"{name}: shape {list(spec.shape)}; FP8 in 128x128 tiles is defined for matrices")
    _check(source, scale, TILE_SCALES, (tuple(-(-size // fp8_block.TILE) for size in spec.shape),), name)

    def load() -> torch.Tensor:
        s = source.load(scale)
        s = s if s.dtype == torch.float32 else s.view(torch.uint8)
        return fp8_block.dequantize(source.load(name).view(torch.uint8), s, torch.bfloat16)

    return Decoded(name, spec.shape, (name, scale), load)


def decoded_weights(source: Source) -> dict[str, Decoded]:
    """Every tensor that the source holds quantised, by name; ConversionError where scales do not fit."""
    found = {}
    for name, stored in source.tensors.items():
        kind = {"U8": _nvfp4, "F8_E4M3": _fp8}.get(stored.spec.dtype)
        if kind is not None and (decoded := kind(source, name)) is not None:
            found[name] = decoded
    return found
