"""MXFP4 (1x32 blocks) to FP8 E4M3 (128x128 tiles, e8m0 scale) in integer arithmetic, with a proof of loss per tile.

Per tile: c_max = largest scale code among blocks with a non-zero element, C = max(c_max - 6, 0) is the tile's code,
and an element becomes e2m1 * 2^(c_j - C) as E4M3 (6 * 2^6 = 384 <= 448). With k = 6 - (c_j - C), k <= 14 is exact
for every element. Edge tiles count existing blocks only; values are not padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

TILE = 128
BLOCK = 32
BLOCKS = TILE // BLOCK
SHIFT_MIN = -13  # at c_j - C <= -13 every element rounds to zero
SHIFT_MAX = 6
HALF_UNITS = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the E2M1 magnitudes


@dataclass(frozen=True)
class Converted:
    """`q` uint8 E4M3 codes [M, N]; `scale`, `max_k`, `lossy` [ceil(M/128), ceil(N/128)]: e8m0 code (uint8), largest
    k of a non-zero block (int32, -1 for an all-zero tile), count of elements that rounded (int32)."""

    q: torch.Tensor
    scale: torch.Tensor
    max_k: torch.Tensor
    lossy: torch.Tensor


def e4m3_of_half_units(half_units: int, shift: int) -> tuple[int, bool]:
    """E4M3 code of (half_units / 2) * 2^shift, round to nearest even, and whether it is exact.

    >>> e4m3_of_half_units(12, 6)  # 6 * 64 = 384 = 1.5 * 2^8
    (124, True)
    """
    numerator, drop = half_units << max(shift + 8, 0), max(-(shift + 8), 0)  # in steps of 2^-9, the subnormal grid
    n = numerator >> drop
    remainder, half = numerator - (n << drop), (1 << drop) >> 1
    if drop and (remainder > half or (remainder == half and n & 1)):
        n += 1
    exponent = max(n.bit_length() - 4, 0)  # bits beyond four leave the linear part of the code
    code = n if exponent == 0 else ((exponent + 1) << 3) | ((n >> exponent) & 7)
    return code, remainder == 0


@lru_cache(maxsize=1)
def conversion_table() -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [20, 8], inexact bool [20, 8]) over shift -13..6 and E2M1 magnitude codes 0..7."""
    rows = [[e4m3_of_half_units(h, s) for h in HALF_UNITS] for s in range(SHIFT_MIN, SHIFT_MAX + 1)]
    codes = torch.tensor([[c for c, _ in row] for row in rows], dtype=torch.uint8)
    return codes, torch.tensor([[not exact for _, exact in row] for row in rows])


def check_inputs(packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Shapes and dtypes of one weight; raises TypeError or ValueError naming the rule."""
    if packed.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"packed must be uint8 or int8, got {packed.dtype}")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"scale must be uint8 or float8_e8m0fnu codes, got {scale.dtype}")
    if packed.dim() != 2 or packed.numel() == 0 or packed.shape[1] % (BLOCK // 2):
        raise ValueError(f"packed must be [out, in/2], non-empty, in a multiple of {BLOCK}, got {tuple(packed.shape)}")
    expected = (packed.shape[0], packed.shape[1] * 2 // BLOCK)
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale must be {expected} for packed {tuple(packed.shape)}, got {tuple(scale.shape)}")


def _tile_max(per_block: torch.Tensor) -> torch.Tensor:
    """Max over 128x128 tiles of an int32 [M, N/32], missing blocks counting -1."""
    rows, cols = per_block.shape
    tiles = (-(-rows // TILE), -(-cols // BLOCKS))
    padded = torch.full((tiles[0] * TILE, tiles[1] * BLOCKS), -1, dtype=torch.int32)
    padded[:rows, :cols] = per_block
    return padded.view(tiles[0], TILE, tiles[1], BLOCKS).amax(dim=(1, 3))


def _to_blocks(per_tile: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return per_tile.repeat_interleave(TILE, 0)[:rows].repeat_interleave(BLOCKS, 1)[:, :cols]


def _chunks(rows: int, bytes_per_row: int) -> list[slice]:
    """Row ranges of about 64 KiB of packed bytes: index arrays stay in the cache."""
    step = max(1, (1 << 16) // bytes_per_row)
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def occupied_blocks(packed: torch.Tensor) -> torch.Tensor:
    """bool [M, N/32]: does the block hold a non-zero element (either sign of zero is zero)."""
    rows, width = packed.shape
    out = torch.empty((rows, width * 2 // BLOCK), dtype=torch.bool)
    halves = packed.contiguous().view(torch.int64).view(rows, -1, 2)
    for part in _chunks(rows, width):
        out[part] = ((halves[part] & 0x7777777777777777) != 0).any(-1)
    return out


def tile_codes(scale: torch.Tensor, occupied: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, max k), both int32 per tile. ValueError on a scale code of 255, naming its place and tile."""
    code = scale.view(torch.uint8).to(torch.int32)
    if bool((code == 255).any()):
        r, c = (int(i) for i in (code == 255).nonzero()[0])
        raise ValueError(f"scale code 255 (NaN) at [{r}, {c}], tile [{r // TILE}, {c // BLOCKS}]")
    c_max = _tile_max(torch.where(occupied, code, -1))
    tile_code = (c_max - 6).clamp_min(0)
    shift = code - _to_blocks(tile_code, *code.shape)
    return tile_code, _tile_max(torch.where(occupied, 6 - shift, -1))


def convert(packed: torch.Tensor, scale: torch.Tensor) -> Converted:
    """One weight: packed uint8/int8 [M, N/2] (low nibble = even column), scale codes [M, N/32]; CPU tensors."""
    check_inputs(packed, scale)
    byte = packed.contiguous().view(torch.uint8)
    rows, cols = scale.shape
    tile_code, max_k = tile_codes(scale, occupied_blocks(byte))
    shift = scale.view(torch.uint8).to(torch.int32) - _to_blocks(tile_code, rows, cols)
    base = (shift.clamp(SHIFT_MIN, SHIFT_MAX) - SHIFT_MIN) * 256

    codes, inexact = conversion_table()
    pairs, counts = _byte_table(codes).view(-1), _count_table(inexact).view(-1)
    q = torch.empty((rows, cols * BLOCK // 2), dtype=torch.int16)
    lossy_blocks = torch.zeros((rows, cols), dtype=torch.int32)
    any_lossy = int(max_k.max()) > 14
    for part in _chunks(rows, byte.shape[1]):
        index = (byte[part].view(-1, cols, BLOCK // 2).to(torch.int32) + base[part].unsqueeze(-1)).view(-1)
        torch.index_select(pairs, 0, index, out=q[part].view(-1))
        if any_lossy:
            lossy_blocks[part] = counts.index_select(0, index).view(-1, cols, BLOCK // 2).sum(-1, dtype=torch.int32)
    return Converted(q.view(torch.uint8), tile_code.to(torch.uint8), max_k, _tile_sum(lossy_blocks))


def _tile_sum(per_block: torch.Tensor) -> torch.Tensor:
    rows, cols = per_block.shape
    tiles = (-(-rows // TILE), -(-cols // BLOCKS))
    padded = torch.zeros((tiles[0] * TILE, tiles[1] * BLOCKS), dtype=torch.int32)
    padded[:rows, :cols] = per_block
    return padded.view(tiles[0], TILE, tiles[1], BLOCKS).sum(dim=(1, 3), dtype=torch.int32)


def _byte_table(codes: torch.Tensor) -> torch.Tensor:
    """int16 [20, 256]: the two E4M3 bytes of one packed byte, the low nibble's first in memory."""
    signed = torch.cat((codes, codes | 0x80), dim=1).to(torch.int32)
    pairs = signed[:, None, :] | (signed[:, :, None] << 8)  # [shift, high nibble, low nibble]
    return pairs.view(-1, 256).to(torch.int16)


def _count_table(inexact: torch.Tensor) -> torch.Tensor:
    """uint8 [20, 256]: how many of the two elements of one packed byte round."""
    one = inexact.to(torch.uint8).repeat(1, 2)
    return (one[:, None, :] + one[:, :, None]).view(-1, 256)
