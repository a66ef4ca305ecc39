"""FP8 E4M3 in small blocks (32x32 or 1x32, power-of-two scales) to 128x128 tiles, with a proof of loss per tile.

Per tile the new scale is the smallest power of two under which the largest element is at most 448; an element is exact
if the E4M3 grid under that scale holds it. All values are exact in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.kernels.formats import E4M3_MAX, e4m3_decode, e4m3_encode, e8m0_decode
from miles.quant.codecs.fp8_block import TILE, spread, tile_amax

BLOCK = 32
# Within these codes every E4M3 value under the scale is a bf16 value.
BF16_CODES = (3, 246)


@dataclass(frozen=True)
class Merged:
    """`q` uint8 E4M3 codes [M, N]; `scale` uint8 e8m0 codes and `lossy` int64 counts of elements that rounded, both
    [ceil(M/128), ceil(N/128)]; `max_abs_error` over all elements."""

    q: torch.Tensor
    scale: torch.Tensor
    lossy: torch.Tensor
    max_abs_error: float


def repeat_rows(code: torch.Tensor, rows: int, block_rows: int) -> torch.Tensor:
    """Scale codes [ceil(M/block_rows), N/32] -> [M, N/32]: each row of a block gets the block's."""
    return code.repeat_interleave(block_rows, 0)[:rows].contiguous()


def values(codes: torch.Tensor, code: torch.Tensor, block_rows: int, *, name: str) -> torch.Tensor:
    """E4M3 codes uint8 [M, N] under e8m0 codes [ceil(M/block_rows), N/32] -> fp64 [M, N], exact.

    ValueError names the first element that is no number.
    """
    bad = (codes & 0x7F) == 0x7F
    if bool(bad.any()):
        raise ValueError(f"{name}: nan at index {[int(i) for i in bad.nonzero()[0]]}")
    factor = e8m0_decode(repeat_rows(code, codes.shape[0], block_rows)).double()
    return e4m3_decode(codes).double() * factor.repeat_interleave(BLOCK, 1)


def merge(codes: torch.Tensor, code: torch.Tensor, block_rows: int, *, name: str = "weight") -> Merged:
    """One weight: E4M3 codes uint8 [M, N], e8m0 codes uint8 [ceil(M/block_rows), N/32], `block_rows` 1 or 32."""
    x = values(codes, code, block_rows, name=name)
    mantissa, exponent = torch.frexp(tile_amax(x))
    # amax = mantissa * 2^exponent and 448 = 0.875 * 2^9.
    power = exponent - 9 + (mantissa > E4M3_MAX / 512).to(exponent.dtype)
    power = torch.where(mantissa == 0, -127, power).clamp_min(-127)
    factor = spread(torch.ldexp(torch.ones_like(mantissa), power), *x.shape)
    q = e4m3_encode((x / factor).float())
    error = (e4m3_decode(q).double() * factor - x).abs()
    return Merged(q, (power + 127).to(torch.uint8), _tile_count(error != 0), float(error.max()))


def _tile_count(flags: torch.Tensor) -> torch.Tensor:
    rows, cols = flags.shape
    grid = (-(-rows // TILE), -(-cols // TILE))
    padded = torch.zeros((grid[0] * TILE, grid[1] * TILE), dtype=torch.int64)
    padded[:rows, :cols] = flags
    return padded.view(grid[0], TILE, grid[1], TILE).sum(dim=(1, 3))
