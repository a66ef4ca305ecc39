"""MXFP4 (E2M1, 1x32 blocks on K, e8m0 scale): code = e8m0_up(amax * fp32(1/6)); q = e2m1(x * 2^(127-code))."""

from __future__ import annotations

import torch

from miles.kernels.formats import (
    e2m1_decode,
    e2m1_encode,
    e8m0_decode,
    e8m0_encode,
    e8m0_inverse,
    pack_e2m1,
    unpack_e2m1,
)
from miles.quant.codecs.checks import check_finite, check_weight

BLOCK = 32
RECIPROCAL = float(torch.tensor(1.0 / 6.0, dtype=torch.float32))


def quantize(weight: torch.Tensor, *, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> (packed codes uint8 [M, K/2], e8m0 codes uint8 [M, K/32])."""
    check_weight(weight, name, block=BLOCK)
    check_finite(weight, name)
    x = weight.float().unflatten(-1, (-1, BLOCK))
    code = e8m0_encode(x.abs().amax(-1) * RECIPROCAL)
    return pack_e2m1(e2m1_encode(x * e8m0_inverse(code).unsqueeze(-1)).flatten(-2)), code


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Packed codes [M, K/2], e8m0 codes uint8 [M, K/32] -> weights of `dtype`."""
    values = e2m1_decode(unpack_e2m1(packed)).unflatten(-1, (-1, BLOCK)) * e8m0_decode(scale).unsqueeze(-1)
    return values.flatten(-2).to(dtype)
