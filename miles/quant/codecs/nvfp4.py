"""NVFP4 (E2M1, 1x16 blocks on K, E4M3 block scale, fp32 tensor scale), standard and 4over6.

The order of operations is written once, in `miles.kernels.nvfp4_qdq.reference`; this module adds the stored form
and the checks. `A` is the max abs of the whole, un-sharded tensor: a caller that holds a shard passes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.kernels.formats import FLT_MAX, e2m1_decode, e4m3_decode, pack_e2m1, unpack_e2m1
from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs.checks import check_finite, check_weight, fp32_scalar

BLOCK = 16
CHUNK = 1 << 21
TE_OVERFLOW = FLT_MAX / 448.0


@dataclass(frozen=True)
class Packed:
    """Stored form. `weight` uint8 [..., K/2]; `weight_scale` E4M3 bytes uint8 [..., K/16]; `weight_scale_2` fp32 = S_dec;
    `amax` fp32 = A, needed by the `te` decode. The last two are [1], or [G, 1, 1] for [G, M, K]."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor
    amax: torch.Tensor


def _checked(weight: torch.Tensor, config: NVFP4QDQConfig, amax: torch.Tensor | None, name: str) -> torch.Tensor:
    check_weight(weight, name, block=BLOCK, dims=(2, 3))
    check_finite(weight, name)
    own = reference.tensor_amax(weight)
    amax = own if amax is None else amax.float().reshape(weight.shape[:-2])
    if not bool((amax.isfinite() & (amax >= own)).all()):
        raise ValueError(
            f"{name}: amax {amax.tolist()} is not a maximum of the whole tensor: this part alone has {own.tolist()}"
        )
    if config.decode == "te" and bool((amax > TE_OVERFLOW).any()):
        raise ValueError(
            f"{name}: max abs {float(amax.max())} is above FLT_MAX/448: decode 'te' overflows, use decode='stored'"
        )
    return amax


def quantize(
    weight: torch.Tensor, config: NVFP4QDQConfig, *, amax: torch.Tensor | None = None, name: str = "weight"
) -> Packed:
    """[M, K] or [G, M, K] -> stored form; `amax` fp32 scalar, or [G], at least the weight's own maximum."""
    amax = _checked(weight, config, amax, name)
    _, s_dec = reference.tensor_scales(amax, config)
    parts = [reference.quantize_blocks(part, amax, config) for part in _row_chunks(weight)]
    shape = (-1, 1, 1) if weight.dim() == 3 else (1,)
    packed = torch.cat([pack_e2m1(part.codes.flatten(-2)) for part in parts], dim=-2)
    return Packed(packed, torch.cat([p.scale8 for p in parts], dim=-2), s_dec.reshape(shape), amax.reshape(shape))


def _row_chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of at most about 2M elements along the rows: bounds the fp32 temporaries of a large weight."""
    per_row = tensor.numel() // tensor.shape[-2]
    return tensor.split(max(1, CHUNK // per_row), dim=-2)


def dequantize(packed: Packed, config: NVFP4QDQConfig, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Stored form -> weights of `dtype`, by the configuration's `decode`; signed zeros kept."""
    parts = []
    for codes, bytes_ in zip(
        _row_chunks(packed.weight), packed.weight_scale.split(_rows(packed.weight), dim=-2), strict=True
    ):
        scale = e4m3_decode(bytes_)
        if config.decode == "te":
            factor = (scale * packed.amax) * fp32_scalar(1.0 / config.encode_numerator, scale)
        else:
            factor = scale * packed.weight_scale_2
        values = e2m1_decode(unpack_e2m1(codes)).unflatten(-1, (-1, BLOCK))
        parts.append((values * factor.unsqueeze(-1)).flatten(-2).to(dtype))
    return torch.cat(parts, dim=-2)


def _rows(tensor: torch.Tensor) -> int:
    return _row_chunks(tensor)[0].shape[-2]


def qdq(
    weight: torch.Tensor, config: NVFP4QDQConfig, *, amax: torch.Tensor | None = None, name: str = "weight"
) -> torch.Tensor:
    """Same shape and dtype as `weight`."""
    return reference.qdq(weight, config, _checked(weight, config, amax, name))
