"""NVFP4 quantise-dequantise in Triton: bit-equal to `reference.py`, one launch over a list of weights.

Weights come by a table of addresses; see `miles.kernels.weight_table`. Arithmetic is in `arithmetic`, the choice of
scales in `choice`, memory access in `tiles`. Kernels set a device flag (bit 0) where the maximum of a tensor is not
finite, and (bit 1) where the `te` decode overflows; nothing here reads it.

EARLY: a kernel lets the next one start before its own end (programmatic dependent launch, compute capability 9.0);
the next one waits before it touches what this one writes.
"""

# ruff: noqa: RUF005, SIM102  (compile-time conditions stand alone; the Triton front end has no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from miles.kernels.nvfp4_qdq.arithmetic import FLT_MAX, max_bits, pack, row_magnitudes, tensor_scales
from miles.kernels.nvfp4_qdq.choice import choose_exact, choose_quickly, out_of_range, quantize_standard
from miles.kernels.nvfp4_qdq.tiles import load_tile, store_tile, words_of


@triton.jit
def reset_kernel(amax_bits: tl.tensor, slots: tl.tensor, SLOTS: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Zero the maxima."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.arange(0, SLOTS)
    for start in range(0, slots, SLOTS):
        tl.store(amax_bits + start + slot, 0, mask=start + slot < slots)


@triton.jit
def _entry(table: tl.tensor, n: tl.tensor, weight: tl.tensor) -> tl.tuple:
    """(source offset and output offset in 16-byte units, blocks, amax slot, first chunk) of one weight in the table.

    Addresses are offsets from one base pointer: the compiler then knows the 16-byte alignment.
    """
    row = table + weight
    return tl.load(row), tl.load(row + n), tl.load(row + 2 * n), tl.load(row + 3 * n), tl.load(row + 4 * n)


@triton.jit
def _chunk_max(words: tl.tensor, start: tl.tensor, stride: tl.tensor, blocks: tl.tensor, ROWS: tl.constexpr, TILES: tl.constexpr, FP16: tl.constexpr, POLICY: tl.constexpr) -> tl.tensor:  # fmt: skip
    best = tl.zeros((ROWS,), tl.int32)
    for t in range(TILES):
        first, second = load_tile(words, start + t * stride, blocks, ROWS, POLICY)
        best = tl.maximum(best, max_bits(row_magnitudes(words_of(first, second, ROWS), FP16)))
    return tl.max(best, axis=0)


@triton.jit
def amax_kernel(
    base: tl.tensor, table: tl.tensor, chunk_weight: tl.tensor, amax_bits: tl.tensor, n: tl.tensor, keep_from: tl.tensor,
    ROWS: tl.constexpr, TILES: tl.constexpr, FP16: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Integer max of the fp32 bits of |x| per slot (int32, zero at start): free of order, so exact.

    Chunks from `keep_from` on ask L2 to keep them for `qdq_kernel`, which starts with them.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    src, _out, blocks, slot, first_chunk = _entry(table, n, tl.load(chunk_weight + chunk))
    words = base + src * 4
    start = (chunk - first_chunk) * ROWS
    stride = tl.cdiv(tl.cdiv(blocks, ROWS), TILES) * ROWS
    if chunk >= keep_from:
        best = _chunk_max(words, start, stride, blocks, ROWS, TILES, FP16, "evict_last")
    else:
        best = _chunk_max(words, start, stride, blocks, ROWS, TILES, FP16, "evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tl.atomic_max(amax_bits + slot, best, sem="relaxed")


@triton.jit
def _finish(
    x: tl.tensor, q: tl.tensor, scale: tl.tensor, dst: tl.tensor, start: tl.tensor, blocks: tl.tensor, amax: tl.tensor, s_dec: tl.tensor, recip: tl.tensor,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, TE_DECODE: tl.constexpr, WIDE: tl.constexpr,
    WRITE: tl.constexpr,
) -> None:  # fmt: skip
    """Dequantise ROWS blocks given as magnitudes and scale, give them the signs of their words `x`, and store."""
    if TE_DECODE:
        factor = (scale * amax) * recip
    else:
        factor = scale * s_dec
    y = ()
    for i in tl.static_range(8):
        word = pack(q[2 * i] * factor, q[2 * i + 1] * factor, FP16, PTX)
        y = y + (word | (x[i] & -2147450880),)  # type: ignore[assignment]  # unrolled: longer by each pass; both sign bits, also of zeros
    store_tile(dst, start, blocks, y, WIDE, ROWS, WRITE)


@triton.jit
def _exact_tile(
    src: tl.tensor, dst: tl.tensor, start: tl.tensor, blocks: tl.tensor, amax: tl.tensor, s_enc: tl.tensor, s_dec: tl.tensor, numerator: tl.tensor, recip: tl.tensor,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FAST: tl.constexpr, FP16_DOMAIN: tl.constexpr,
    MSE: tl.constexpr, TE_DECODE: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """4over6 of one tile by the reference's own errors; returns the bits of each block's max abs."""
    first, second = load_tile(src, start, blocks, ROWS, "")
    x = words_of(first, second, ROWS)
    m = row_magnitudes(x, FP16)
    bits = max_bits(m)
    a = bits.to(tl.float32, bitcast=True)
    q, scale = choose_exact(m, a, amax, s_enc, s_dec, numerator, recip, PTX, FAST, FP16_DOMAIN, MSE)
    _finish(x, q, scale, dst, start, blocks, amax, s_dec, recip, ROWS, FP16, PTX, TE_DECODE, WIDE, "")
    return bits


@triton.jit
def _raise_flag(
    flag: tl.tensor, worst: tl.tensor, amax: tl.tensor, TE_DECODE: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """Bit 0: a block holds NaN or infinity. Bit 1: `te` overflows. Lane by lane: no reduction in the usual case."""
    tl.atomic_or(flag + tl.zeros((ROWS,), tl.int32), 1, mask=worst >= 0x7F800000, sem="relaxed")
    if TE_DECODE:
        if amax * 448.0 > FLT_MAX:
            tl.atomic_or(flag, 2, sem="relaxed")


@triton.jit
def _or(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b


@triton.jit
def _chunk(
    src: tl.tensor, dst: tl.tensor, start: tl.tensor, stride: tl.tensor, tiles: tl.tensor, blocks: tl.tensor, amax: tl.tensor, numerator: tl.tensor, recip: tl.tensor, flag: tl.tensor,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr,
    WIDE: tl.constexpr, AHEAD: tl.constexpr, WRITE: tl.constexpr,
) -> None:  # fmt: skip
    """`tiles` tiles from block `start`, `stride` blocks apart: neighbouring programs stay side by side in memory.

    Under 4over6 tiles with a block whose quick choice is unsure are done again at the end, exactly.
    """
    s_enc, s_dec = tensor_scales(amax, numerator)
    worst = tl.zeros((ROWS,), tl.int32)
    again = tl.zeros((ROWS,), tl.int32)
    if AHEAD:
        first, second = load_tile(src, start, blocks, ROWS, "")
    for t in range(tiles):
        here = start + t * stride
        if AHEAD:
            next_first, next_second = load_tile(src, here + stride, tl.where(t + 1 < tiles, blocks, 0), ROWS, "")
        else:
            first, second = load_tile(src, here, blocks, ROWS, "")
        x = words_of(first, second, ROWS)
        m = row_magnitudes(x, FP16)
        bits = max_bits(m)
        a = bits.to(tl.float32, bitcast=True)
        if FOUR_OVER_SIX:
            q, scale, unsure = choose_quickly(m, a, amax, s_enc, s_dec, recip, PTX, MSE)
            again |= unsure.to(tl.int32) << t
        else:
            q, scale = quantize_standard(m, a, s_enc, s_dec, PTX)
        _finish(x, q, scale, dst, here, blocks, amax, s_dec, recip, ROWS, FP16, PTX, TE_DECODE, WIDE, WRITE)
        worst = tl.maximum(worst, bits)
        if AHEAD:
            first = next_first
            second = next_second
    _raise_flag(flag, worst, amax, TE_DECODE, ROWS)
    if FOUR_OVER_SIX:
        todo = tl.reduce(again, 0, _or)
        for t in range(tiles):
            if ((todo >> t) & 1) != 0:
                _exact_tile(
                    src, dst, start + t * stride, blocks, amax, s_enc, s_dec, numerator, recip,
                    ROWS, FP16, PTX, True, FP16_DOMAIN, MSE, TE_DECODE, WIDE,
                )  # fmt: skip


@triton.jit
def qdq_kernel(
    base: tl.tensor, table: tl.tensor, out: tl.tensor, amax_bits: tl.tensor, flag: tl.tensor, n: tl.tensor, chunk_weight: tl.tensor, chunks: tl.tensor, numerator: tl.tensor, recip: tl.tensor,
    ROWS: tl.constexpr, TILES: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
    WRITE: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise and dequantise; chunks run last to first, so that what an amax pass left in L2 is read first.

    4over6 leaves weights with an extreme maximum to `extreme_kernel`.
    """
    chunk = chunks - 1 - tl.program_id(0)
    src, dst, blocks, slot, first_chunk = _entry(table, n, tl.load(chunk_weight + chunk))
    if EARLY:
        tl.extra.cuda.gdc_wait()
    amax = tl.load(amax_bits + slot).to(tl.float32, bitcast=True)
    if FOUR_OVER_SIX:
        if out_of_range(amax):
            return
    start = (chunk - first_chunk) * ROWS
    stride = tl.cdiv(tl.cdiv(blocks, ROWS), TILES) * ROWS
    _chunk(
        base + src * 4, out + dst * 4, start, stride, TILES, blocks, amax, numerator, recip, flag,
        ROWS, FP16, PTX, FOUR_OVER_SIX, FP16_DOMAIN, MSE, TE_DECODE, WIDE, AHEAD, WRITE,
    )  # fmt: skip


@triton.jit
def extreme_kernel(
    base: tl.tensor, table: tl.tensor, out: tl.tensor, amax_bits: tl.tensor, flag: tl.tensor, n: tl.tensor, numerator: tl.tensor, recip: tl.tensor,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr,
    TE_DECODE: tl.constexpr,
) -> None:  # fmt: skip
    """4over6 for weights with an extreme maximum: full divisions. A few programs share all weights."""
    for weight in range(n):
        src, dst, blocks, slot, _first = _entry(table, n, weight)
        amax = tl.load(amax_bits + slot).to(tl.float32, bitcast=True)
        if out_of_range(amax):
            s_enc, s_dec = tensor_scales(amax, numerator)
            worst = tl.zeros((ROWS,), tl.int32)
            stride = tl.num_programs(0).to(tl.int64) * ROWS
            for start in range(tl.program_id(0).to(tl.int64) * ROWS, blocks, stride):
                bits = _exact_tile(
                    base + src * 4, out + dst * 4, start, blocks, amax, s_enc, s_dec, numerator, recip,
                    ROWS, FP16, PTX, False, FP16_DOMAIN, MSE, TE_DECODE, False,
                )  # fmt: skip
                worst = tl.maximum(worst, bits)
            _raise_flag(flag, worst, amax, TE_DECODE, ROWS)
