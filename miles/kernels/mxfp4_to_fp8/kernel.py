"""MXFP4 to FP8 in Triton: one program per 128x128 tile, one launch over a list of weights, bits of `reference.py`.

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
def tile_kernel(
    packed, scales, table, tile_weight, lut, out, tile_scale, tile_info, flag, n, PTX: tl.constexpr,
):  # fmt: skip
    """`tile_info` int32 = lossy elements | (max k + 1) << 16. A NaN scale sets `flag` to the tile index + 1."""
    tile = tl.program_id(0)
    row = table + tl.load(tile_weight + tile)
    src, scale_offset, rows, cols = tl.load(row), tl.load(row + n), tl.load(row + 2 * n), tl.load(row + 3 * n)
    dst, local = tl.load(row + 4 * n), tile - tl.load(row + 5 * n)
    tile_cols = tl.cdiv(cols, 4)
    block = tl.arange(0, 512)
    r = (local // tile_cols) * 128 + block // 4
    c = (local % tile_cols) * 4 + block % 4
    inside = (r < rows) & (c < cols)
    index = r * cols + c

    offset = index[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(packed + src * 4 + offset, mask=inside[:, None], other=0)
    code = tl.load(scales + scale_offset + index, mask=inside, other=0).to(tl.int32)
    even, odd = tl.split(tl.reshape(words, (512, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    occupied = ((w0 | w1 | w2 | w3) & 0x77777777) != 0
    c_max = tl.max(tl.where(code == 255, 511, tl.where(occupied, code, -1)), axis=0)
    tile_code = tl.maximum(c_max - 6, 0)
    shift = code - tile_code
    entry = lut + (tl.minimum(tl.maximum(shift, -13), 6) + 13) * 4
    low, high = tl.load(entry), tl.load(entry + 1)

    a = tl.join(tl.join(_e4m3x4(low, high, w0, PTX), _e4m3x4(low, high, w1, PTX)), tl.join(_e4m3x4(low, high, w0 >> 16, PTX), _e4m3x4(low, high, w1 >> 16, PTX)))  # fmt: skip
    b = tl.join(tl.join(_e4m3x4(low, high, w2, PTX), _e4m3x4(low, high, w3, PTX)), tl.join(_e4m3x4(low, high, w2 >> 16, PTX), _e4m3x4(low, high, w3 >> 16, PTX)))  # fmt: skip
    target = out + dst * 4 + index[:, None] * 8 + tl.arange(0, 4)[None, :]
    tl.store(target, tl.reshape(a, (512, 4)), mask=inside[:, None])
    tl.store(target + 4, tl.reshape(b, (512, 4)), mask=inside[:, None])

    max_k = tl.max(tl.where(occupied, 6 - shift, -1), axis=0)
    info = (max_k + 1) << 16
    if max_k > 14:
        mask = tl.where(inside, tl.load(entry + 2), 0)
        info += tl.sum(_inexact8(mask, w0) + _inexact8(mask, w1) + _inexact8(mask, w2) + _inexact8(mask, w3), axis=0)
    if c_max == 511:
        tl.atomic_max(flag, tile + 1, sem="relaxed")
    tl.store(tile_scale + tile, tile_code.to(tl.uint8))
    tl.store(tile_info + tile, info)
