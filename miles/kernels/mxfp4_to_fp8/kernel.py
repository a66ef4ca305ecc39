"""MXFP4 to FP8 in Triton: one program per 128x128 tile, one launch over a list of weights, bits of `reference.py`.

One lane owns half blocks: 16 elements, 8 bytes in, 16 bytes out, so loads and stores fill whole sectors without
exchanging data between lanes. The E4M3 byte of each E2M1 magnitude depends on the block's shift only: eight bytes,
one 64-bit entry of a 20-row table, from which `prmt` picks four elements at a time (NVIDIA); elsewhere and in the
interpreter a 64-bit shift does the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(1024)  # half blocks of a tile: 128 rows of 8


@triton.jit
def _lookup4(table: tl.tensor, selector: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Four bytes of the 64-bit table chosen by the low four nibbles (each 0..7) of `selector`."""
    if PTX:
        picked = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r",
            [table.to(tl.int32), (table >> 32).to(tl.int32), selector], tl.int32, True, 1,
        )  # fmt: skip
    else:
        picked = ((table >> ((selector & 7) * 8).to(tl.int64)) & 0xFF).to(tl.int32)
        for i in tl.static_range(1, 4):
            byte = (table >> (((selector >> (4 * i)) & 7) * 8).to(tl.int64)) & 0xFF
            picked = picked | (byte << (8 * i)).to(tl.int32)
    return picked


@triton.jit
def _e4m3x4(table: tl.tensor, nibbles: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Four E2M1 codes (low 16 bits of `nibbles`) -> four E4M3 bytes."""
    sign = _lookup4((nibbles * 0 + 0x8000).to(tl.int64), (nibbles >> 3) & 0x1111, PTX)
    return _lookup4(table, nibbles & 0x7777, PTX) | sign


@triton.jit
def _inexact_count(mask: tl.tensor, w0: tl.tensor, w1: tl.tensor) -> tl.tensor:
    """How many elements of two words round, given the block's bit per magnitude. A true loop: rare, few registers."""
    count = mask * 0
    for shift in range(0, 32, 4):
        count += ((mask >> ((w0 >> shift) & 7)) & 1) + ((mask >> ((w1 >> shift) & 7)) & 1)
    return tl.sum(count, axis=0)


@triton.jit
def _max2(a0: tl.tensor, a1: tl.tensor, b0: tl.tensor, b1: tl.tensor) -> tl.tuple:
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def tile_kernel(
    packed: tl.tensor, scales: tl.tensor, table: tl.tensor, tile_weight: tl.tensor, lut: tl.tensor, inexact: tl.tensor, out: tl.tensor, tile_scale: tl.tensor, tile_info: tl.tensor, flag: tl.tensor, n: tl.tensor, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """A program converts one tile; neighbouring programs take neighbouring tiles of a row of tiles.

    `tile_info` int32 = lossy elements | (max k + 1) << 16. A NaN scale sets `flag` to the tile index + 1.
    """
    program = tl.program_id(0)
    row = table + tl.load(tile_weight + program)
    src, scale_offset, rows, cols = tl.load(row), tl.load(row + n), tl.load(row + 2 * n), tl.load(row + 3 * n)
    dst, first_tile, local = tl.load(row + 4 * n), tl.load(row + 5 * n), program - tl.load(row + 6 * n)
    tile_cols = tl.cdiv(cols, 4)
    tile_row, tile_col = local // tile_cols, local % tile_cols
    # 64-bit up to the first block of the tile, 32-bit inside it (128 rows).
    first_block = tile_row * 128 * cols + tile_col * 4
    width = tl.minimum((cols - tile_col * 4) * 2, 8).to(tl.int32)
    height = tl.minimum(rows - tile_row * 128, 128).to(tl.int32)
    i = tl.arange(0, UNITS)
    unit = (i // 8) * (cols * 2).to(tl.int32) + i % 8
    inside = (i // 8 < height) & (i % 8 < width)
    words = tl.load(
        packed + (src + first_block) * 4 + (unit[:, None] * 2 + tl.arange(0, 2)[None, :]), mask=inside[:, None], other=0
    )  # fmt: skip
    code = tl.load(scales + (scale_offset + first_block) + unit // 2, mask=inside, other=0).to(tl.int32)

    w0, w1 = tl.split(words)
    occupied = ((w0 | w1) & 0x77777777) != 0
    # One reduction for the largest code (511 for NaN) and, negated, the smallest one.
    largest = tl.where((code == 255) & inside, 511, tl.where(occupied, code, -1))
    c_max, negated_min = tl.reduce((largest, tl.where(occupied, -code, -512)), 0, _max2)
    tile_code = tl.maximum(c_max - 6, 0)
    entry = tl.minimum(tl.maximum(code - tile_code, -13), 6) + 13
    lookup = tl.load(lut + entry)
    first = tl.join(_e4m3x4(lookup, w0, PTX), _e4m3x4(lookup, w1, PTX))
    second = tl.join(_e4m3x4(lookup, w0 >> 16, PTX), _e4m3x4(lookup, w1 >> 16, PTX))
    target = out + (dst + first_block * 2) * 4 + (unit[:, None] * 4 + tl.arange(0, 4)[None, :])
    tl.store(target, tl.reshape(tl.join(first, second), (UNITS, 4)), mask=inside[:, None])

    tile = (first_tile + local).to(tl.int32)
    max_k = tl.where(c_max < 0, -1, 6 + negated_min + tile_code)
    info = (max_k + 1) << 16
    if max_k > 14:
        mask = tl.where(inside, tl.load(inexact + entry), 0)
        info += _inexact_count(mask, w0, w1)
    if c_max == 511:
        tl.atomic_max(flag, tile + 1, sem="relaxed")
    tl.store(tile_scale + tile, tile_code.to(tl.uint8))
    tl.store(tile_info + tile, info)
