"""FP8 E4M3 in 128x128 blocks: s = max(amax, 1e-10) / 448, or that rounded up to a power of two; q = e4m3(x / s).

The stored scale is `weight_scale_inv` [ceil(M/128), ceil(N/128)]: fp32, or e8m0 bytes.
"""

from __future__ import annotations

from typing import Literal

import torch

from miles.kernels.formats import E4M3_MAX, e4m3_decode, e4m3_encode, e8m0_decode, e8m0_encode
from miles.quant.codecs.checks import check_finite, check_weight, fp32_scalar

TILE = 128
FLOOR = 1e-10
ScaleKind = Literal["fp32", "e8m0"]


def spread(per_tile: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[ceil(rows/128), ceil(cols/128)] -> [rows, cols]."""
    return per_tile.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :cols]


def tile_amax(x: torch.Tensor) -> torch.Tensor:
    """Max abs of each 128x128 tile of [M, N], edge tiles padded with zeros."""
    rows, cols = x.shape
    grid = (-(-rows // TILE), -(-cols // TILE))
    padded = torch.zeros((grid[0] * TILE, grid[1] * TILE), dtype=x.dtype, device=x.device)
    padded[:rows, :cols] = x.abs()
    return padded.view(grid[0], TILE, grid[1], TILE).amax(dim=(1, 3))


def quantize(
    weight: torch.Tensor, *, scale: ScaleKind = "fp32", name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, N] -> (codes uint8 [M, N], scale [ceil(M/128), ceil(N/128)] fp32 or e8m0 bytes)."""
    check_weight(weight, name)
    check_finite(weight, name)
    x = weight.float()
    s = torch.maximum(tile_amax(x), fp32_scalar(FLOOR, x)) / fp32_scalar(E4M3_MAX, x)
    stored = s
    if scale == "e8m0":
        stored = e8m0_encode(s)
        s = e8m0_decode(stored)
    return e4m3_encode(x / spread(s, *x.shape)), stored


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Codes uint8 [M, N] and a scale (fp32, or e8m0 bytes as uint8) -> weights of `dtype`."""
    s = e8m0_decode(scale) if scale.dtype == torch.uint8 else scale
    return (e4m3_decode(codes) * spread(s, *codes.shape)).to(dtype)
