"""FP8 E4M3 with one fp32 scale per tensor: s = max(amax, 1e-12) / 448, q = e4m3(x / s), y = q * s."""

from __future__ import annotations

import torch

from miles.kernels.formats import E4M3_MAX, e4m3_decode, e4m3_encode
from miles.quant.codecs.checks import check_finite, check_weight, fp32_scalar

FLOOR = 1e-12


def quantize(weight: torch.Tensor, *, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 of the same shape, scale fp32 [1])."""
    check_weight(weight, name, dims=(1, 2, 3))
    check_finite(weight, name)
    x = weight.float()
    scale = torch.maximum(x.abs().amax(), fp32_scalar(FLOOR, x)) / fp32_scalar(E4M3_MAX, x)
    return e4m3_encode(x / scale), scale.reshape(1)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Codes uint8 and scale fp32 [1] -> weights of `dtype`."""
    return (e4m3_decode(codes) * scale).to(dtype)
