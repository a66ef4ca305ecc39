"""MXFP4 to FP8 in Triton: one program per strip of 128x128 tiles, one launch over a list of weights, bits of `reference.py`.

One lane owns whole 32-element blocks (16 bytes in, 32 bytes out). The E4M3 byte of each E2M1 magnitude depends on
the block's shift only: eight bytes, read from a 20-row table, from which `prmt` picks four elements at a time
(NVIDIA); elsewhere and in the interpreter a 64-bit shift does the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lookup4(low, high, selector, PTX: tl.constexpr):
    """Four bytes of the table (low, high) chosen by the low four nibbles (each 0..7) of `selector`."""
    if PTX:
        picked = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.int32, True, 1
        )
    else:
        table = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        picked = ((table >> ((selector & 7) * 8).to(tl.int64)) & 0xFF).to(tl.int32)
        for i in tl.static_range(1, 4):
            byte = (table >> (((selector >> (4 * i)) & 7) * 8).to(tl.int64)) & 0xFF
            picked = picked | (byte << (8 * i)).to(tl.int32)
    return picked


@triton.jit
def _e4m3x4(low, high, nibbles, PTX: tl.constexpr):
    """Four E2M1 codes (low 16 bits of `nibbles`) -> four E4M3 bytes."""
    sign = _lookup4(nibbles * 0 + 0x8000, nibbles * 0, (nibbles >> 3) & 0x1111, PTX)
    return _lookup4(low, high, nibbles & 0x7777, PTX) | sign


@triton.jit
def _inexact8(mask, word):
    """How many of the eight elements of a word round, given the block's bit per magnitude."""
    count = (mask >> (word & 7)) & 1
    for i in tl.static_range(1, 8):
        count += (mask >> ((word >> (4 * i)) & 7)) & 1
    return count


@triton.jit
def _max2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _load_tile(packed, scales, index, inside):
    """Words [512, 4] and scale codes [512] (int32) of one tile; missing blocks read as zero."""
    offset = index[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(packed + offset, mask=inside[:, None], other=0)
    return words, tl.load(scales + index, mask=inside, other=0).to(tl.int32)


@triton.jit
def _convert_tile(words, code, inside, index, lut, out, tile, tile_scale, tile_info, flag, PTX: tl.constexpr):
    even, odd = tl.split(tl.reshape(words, (512, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    occupied = ((w0 | w1 | w2 | w3) & 0x77777777) != 0
    # One reduction for the largest code (511 for NaN) and, negated, the smallest one.
    largest = tl.where((code == 255) & inside, 511, tl.where(occupied, code, -1))
    c_max, negated_min = tl.reduce((largest, tl.where(occupied, -code, -512)), 0, _max2)
    tile_code = tl.maximum(c_max - 6, 0)
    entry = lut + (tl.minimum(tl.maximum(code - tile_code, -13), 6) + 13) * 4
    low, high = tl.load(entry), tl.load(entry + 1)

    a0 = tl.join(_e4m3x4(low, high, w0, PTX), _e4m3x4(low, high, w1, PTX))
    a1 = tl.join(_e4m3x4(low, high, w0 >> 16, PTX), _e4m3x4(low, high, w1 >> 16, PTX))
    b0 = tl.join(_e4m3x4(low, high, w2, PTX), _e4m3x4(low, high, w3, PTX))
    b1 = tl.join(_e4m3x4(low, high, w2 >> 16, PTX), _e4m3x4(low, high, w3 >> 16, PTX))
    target = out + index[:, None] * 8 + tl.arange(0, 4)[None, :]
    tl.store(target, tl.reshape(tl.join(a0, a1), (512, 4)), mask=inside[:, None])
    tl.store(target + 4, tl.reshape(tl.join(b0, b1), (512, 4)), mask=inside[:, None])

    max_k = tl.where(c_max < 0, -1, 6 + negated_min + tile_code)
    info = (max_k + 1) << 16
    if max_k > 14:
        mask = tl.where(inside, tl.load(entry + 2), 0)
        info += tl.sum(_inexact8(mask, w0) + _inexact8(mask, w1) + _inexact8(mask, w2) + _inexact8(mask, w3), axis=0)
    if c_max == 511:
        tl.atomic_max(flag, tile + 1, sem="relaxed")
    tl.store(tile_scale + tile, tile_code.to(tl.uint8))
    tl.store(tile_info + tile, info)


@triton.jit
def strip_kernel(
    packed, scales, table, strip_weight, lut, out, tile_scale, tile_info, flag, n, TILES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program converts TILES tiles side by side, the next one read ahead.

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
    source, scale, target = packed + src * 4, scales + scale_offset, out + dst * 4
    block = tl.arange(0, 512)
    r = tile_row * 128 + block // 4
    c = start * 4 + block % 4
    stop = tl.minimum(start + TILES, tile_cols)
    end = tl.minimum(stop * 4, cols)
    words, code = _load_tile(source, scale, r * cols + c, (r < rows) & (c < end))
    for t in range(start, stop):
        inside = (r < rows) & (c < end)
        index = r * cols + c
        c += 4
        next_words, next_code = _load_tile(source, scale, r * cols + c, (r < rows) & (c < end))
        tile = (first_tile + tile_row * tile_cols + t).to(tl.int32)
        _convert_tile(words, code, inside, index, lut, target, tile, tile_scale, tile_info, flag, PTX)
        words = next_words
        code = next_code
