"""MXFP4 to FP8 in Triton: one program per strip of 128x128 tiles, one launch over a list of weights, bits of `reference.py`.

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
def _lookup4(table, selector, PTX: tl.constexpr):
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
def _e4m3x4(table, nibbles, PTX: tl.constexpr):
    """Four E2M1 codes (low 16 bits of `nibbles`) -> four E4M3 bytes."""
    sign = _lookup4((nibbles * 0 + 0x8000).to(tl.int64), (nibbles >> 3) & 0x1111, PTX)
    return _lookup4(table, nibbles & 0x7777, PTX) | sign


@triton.jit
def _inexact_count(mask, w0, w1):
    """How many elements of two words round, given the block's bit per magnitude. A true loop: rare, few registers."""
    count = mask * 0
    for shift in range(0, 32, 4):
        count += ((mask >> ((w0 >> shift) & 7)) & 1) + ((mask >> ((w1 >> shift) & 7)) & 1)
    return tl.sum(count, axis=0)


@triton.jit
def _max2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _load_tile(packed, scales, unit, inside):
    """Words [1024, 2] and scale codes [1024] (int32) of one tile by unit index; missing units read as zero."""
    offset = unit[:, None] * 2 + tl.arange(0, 2)[None, :]
    words = tl.load(packed + offset, mask=inside[:, None], other=0)
    return words, tl.load(scales + unit // 2, mask=inside, other=0).to(tl.int32)


@triton.jit
def _convert_tile(words, code, inside, unit, lut, inexact, out, tile, tile_scale, tile_info, flag, PTX: tl.constexpr):
    w0, w1 = tl.split(words)
    occupied = ((w0 | w1) & 0x77777777) != 0
    # One reduction for the largest code (511 for NaN) and, negated, the smallest one.
    largest = tl.where((code == 255) & inside, 511, tl.where(occupied, code, -1))
    c_max, negated_min = tl.reduce((largest, tl.where(occupied, -code, -512)), 0, _max2)
    tile_code = tl.maximum(c_max - 6, 0)
    entry = tl.minimum(tl.maximum(code - tile_code, -13), 6) + 13
    table = tl.load(lut + entry)

    first = tl.join(_e4m3x4(table, w0, PTX), _e4m3x4(table, w1, PTX))
    second = tl.join(_e4m3x4(table, w0 >> 16, PTX), _e4m3x4(table, w1 >> 16, PTX))
    target = out + unit[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(target, tl.reshape(tl.join(first, second), (UNITS, 4)), mask=inside[:, None])

    max_k = tl.where(c_max < 0, -1, 6 + negated_min + tile_code)
    info = (max_k + 1) << 16
    if max_k > 14:
        mask = tl.where(inside, tl.load(inexact + entry), 0)
        info += _inexact_count(mask, w0, w1)
    if c_max == 511:
        tl.atomic_max(flag, tile + 1, sem="relaxed")
    tl.store(tile_scale + tile, tile_code.to(tl.uint8))
    tl.store(tile_info + tile, info)


@triton.jit
def strip_kernel(
    packed, scales, table, strip_weight, lut, inexact, out, tile_scale, tile_info, flag, n,
    TILES: tl.constexpr, AHEAD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program converts TILES tiles side by side; AHEAD reads the next one before it converts.

    `tile_info` int32 = lossy elements | (max k + 1) << 16. A NaN scale sets `flag` to the tile index + 1.
    """
    strip = tl.program_id(0)
    row = table + tl.load(strip_weight + strip)
    src, scale_offset, rows, cols = tl.load(row), tl.load(row + n), tl.load(row + 2 * n), tl.load(row + 3 * n)
    dst, first_tile, local = tl.load(row + 4 * n), tl.load(row + 5 * n), strip - tl.load(row + 6 * n)
    tile_cols = tl.cdiv(cols, 4)
    strips = tl.cdiv(tile_cols, TILES)
    tile_row = local // strips
    start = (local % strips) * TILES
    # 64-bit up to the first block of the strip, 32-bit inside it (128 rows).
    first_block = tile_row * 128 * cols + start * 4
    source = packed + src * 4 + first_block * 4
    scale = scales + scale_offset + first_block
    target = out + dst * 4 + first_block * 8
    stop = tl.minimum(start + TILES, tile_cols)
    width = ((tl.minimum(stop * 4, cols) - start * 4) * 2).to(tl.int32)
    height = tl.minimum(rows - tile_row * 128, 128).to(tl.int32)
    local_unit = tl.arange(0, UNITS)
    c = local_unit % 8
    unit = (local_unit // 8) * (cols * 2).to(tl.int32) + c
    below = local_unit // 8 < height
    if AHEAD:
        words, code = _load_tile(source, scale, unit, below & (c < width))
    for t in range(start, stop):
        inside = below & (c < width)
        c += 8
        if AHEAD:
            next_words, next_code = _load_tile(source, scale, unit + 8, below & (c < width))
        else:
            words, code = _load_tile(source, scale, unit, inside)
        tile = (first_tile + tile_row * tile_cols + t).to(tl.int32)
        _convert_tile(words, code, inside, unit, lut, inexact, target, tile, tile_scale, tile_info, flag, PTX)
        if AHEAD:
            words = next_words
            code = next_code
        unit += 8
