"""MXFP8 (E4M3, 1x32 blocks on K, e8m0 scale): code = e8m0_up(amax * fp32(1/448)); q = e4m3(x * 2^(127-code))."""

from __future__ import annotations

import torch

from miles.kernels.formats import e4m3_decode, e4m3_encode, e8m0_decode, e8m0_encode, e8m0_inverse
from miles.quant.codecs.checks import check_finite, check_weight

BLOCK = 32
RECIPROCAL = float(torch.tensor(1.0 / 448.0, dtype=torch.float32))


def quantize(weight: torch.Tensor, *, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> (codes uint8 [M, K], e8m0 codes uint8 [M, K/32])."""
    check_weight(weight, name, block=BLOCK)
    check_finite(weight, name)
    x = weight.float().unflatten(-1, (-1, BLOCK))
    code = e8m0_encode(x.abs().amax(-1) * RECIPROCAL)
    return e4m3_encode(x * e8m0_inverse(code).unsqueeze(-1)).flatten(-2), code


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Codes uint8 [M, K], e8m0 codes uint8 [M, K/32] -> weights of `dtype`."""
    values = e4m3_decode(codes).unflatten(-1, (-1, BLOCK)) * e8m0_decode(scale).unsqueeze(-1)
    return values.flatten(-2).to(dtype)
