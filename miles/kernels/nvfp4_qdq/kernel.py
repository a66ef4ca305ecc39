"""NVFP4 quantise-dequantise in Triton: bit-equal to `reference.py`, one launch over a list of weights.

One lane owns one block of 16: two loads of 8 elements, everything else in registers, so the 4over6 error is a true
left-to-right sum. Rounding is done by adding a power of two that leaves the wanted mantissa bits (E2M1: one, E4M3:
three), which is exact round to nearest even in the hardware adder. The kernels must be compiled without FMA
contraction. `PTX` selects two NVIDIA forms of the same arithmetic (packed conversion, Markstein division); without
it everything is portable and runs in the interpreter. Weights come by a table of addresses; see `miles.kernels.weight_table`.

Kernels set a device flag (bit 0) where the maximum of a tensor is not finite, and (bit 1) where the `te` decode
overflows; nothing here reads it.
"""

# ruff: noqa: RUF005, SIM102  (compile-time conditions stand alone; the Triton front end has no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(0.16666667163372040)


@triton.jit
def _round_mantissa(m, BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """m >= 0 fp32 -> nearest value with BITS mantissa bits and exponents from MIN_EXPONENT, ties to even."""
    shift: tl.constexpr = (23 - BITS) << 23
    floor: tl.constexpr = (MIN_EXPONENT + 127 + 23 - BITS) << 23
    magic = tl.maximum((m.to(tl.int32, bitcast=True) & 0x7F800000) + shift, floor).to(tl.float32, bitcast=True)
    return (m + magic) - magic


@triton.jit
def _e2m1(x, inv):
    """x * inv (x >= 0) rounded to an E2M1 magnitude 0..6, as fp32."""
    return _round_mantissa(tl.minimum(x * inv, 6.0), 1, 0)


@triton.jit
def _e4m3(s):
    """s >= 0 rounded to an E4M3 magnitude 0..448, as fp32."""
    return _round_mantissa(tl.minimum(s, 448.0), 3, -6)


@triton.jit
def _inverse(scale, s_dec, PTX: tl.constexpr):
    """1 / (scale * S_dec), rounded to nearest, infinity limited to FLT_MAX."""
    product = scale * s_dec
    if PTX:
        inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [product], tl.float32, True, 1)
    else:
        inverse = tl.div_rn(1.0, product)
    return tl.minimum(inverse, FLT_MAX)


@triton.jit
def _magnitudes(word, FP16: tl.constexpr):
    """One 32-bit word -> the magnitudes of its (low, high) elements as fp32."""
    word = word & 0x7FFF7FFF
    if FP16:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _pack(low, high, FP16: tl.constexpr, PTX: tl.constexpr):
    """Two non-negative fp32 -> one word of two 16-bit floats, round to nearest even."""
    if PTX:
        if FP16:
            word = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], tl.int32, True, 1)
        else:
            word = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], tl.int32, True, 1)
    elif FP16:
        low_bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        word = low_bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        a = low.to(tl.int32, bitcast=True)
        b = high.to(tl.int32, bitcast=True)
        word = ((a + 0x7FFF + ((a >> 16) & 1)) >> 16) | ((b + 0x7FFF + ((b >> 16) & 1)) & -65536)
    return word


@triton.jit
def _split4(tile, ROWS: tl.constexpr):
    """[ROWS, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _join4(c0, c1, c2, c3, ROWS: tl.constexpr):
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (ROWS, 4))


@triton.jit
def _rows_left(start, blocks, ROWS: tl.constexpr):
    """64-bit offsets end here: inside a tile everything is 32-bit."""
    return tl.minimum(blocks - start, ROWS).to(tl.int32)


@triton.jit
def _load(base, start, blocks, ROWS: tl.constexpr):
    """The words of blocks start..start+ROWS-1 as two tiles [ROWS, 4], one vector load each; from `blocks` on, zero."""
    row = tl.arange(0, ROWS)
    offset = row[:, None] * 8 + tl.arange(0, 4)[None, :]
    mask = (row < _rows_left(start, blocks, ROWS))[:, None]
    base += start * 8
    first = tl.load(base + offset, mask=mask, other=0)
    return first, tl.load(base + offset + 4, mask=mask, other=0)


@triton.jit
def _store(base, start, blocks, y, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Eight words of each block. WIDE exchanges halves between lanes first, so that each store fills whole sectors."""
    row = tl.arange(0, ROWS)
    mask = (row < _rows_left(start, blocks, ROWS))[:, None]
    base += start * 8
    first = _join4(y[0], y[1], y[2], y[3], ROWS)
    second = _join4(y[4], y[5], y[6], y[7], ROWS)
    if WIDE:
        whole = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 8))
        tl.store(base + row[:, None] * 8 + tl.arange(0, 8)[None, :], whole, mask=mask)
    else:
        offset = row[:, None] * 8 + tl.arange(0, 4)[None, :]
        tl.store(base + offset, first, mask=mask)
        tl.store(base + offset + 4, second, mask=mask)


@triton.jit
def _words(first, second, ROWS: tl.constexpr):
    """Two tiles -> the eight words of each block."""
    w0, w1, w2, w3 = _split4(first, ROWS)
    w4, w5, w6, w7 = _split4(second, ROWS)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _row_magnitudes(x, FP16: tl.constexpr):
    """Eight words -> 16 magnitudes."""
    m = ()
    for i in tl.static_range(8):
        low, high = _magnitudes(x[i], FP16)
        m = m + (low, high)
    return m


@triton.jit
def _max_bits(m):
    """Largest of 16 magnitudes per row, as the bits of an fp32 (NaN and infinity are the largest)."""
    best = tl.maximum(m[0].to(tl.int32, bitcast=True), m[1].to(tl.int32, bitcast=True))
    for i in tl.static_range(1, 8):
        best = tl.maximum(
            tl.maximum(best, m[2 * i].to(tl.int32, bitcast=True)), m[2 * i + 1].to(tl.int32, bitcast=True)
        )
    return best


@triton.jit
def _divide(n, numerator, recip):
    """n / numerator correctly rounded, by Markstein's theorem: `recip` is the rounded reciprocal, all values normal."""
    quotient = n * recip
    return tl.fma(tl.fma(-quotient, numerator, n), recip, quotient)


@triton.jit
def _difference(q, scale, one, three_halves, x, xs, amax, numerator, FAST: tl.constexpr, FP16_DOMAIN: tl.constexpr):
    """Dequantised value minus x, from magnitudes (q and x carry the same sign); xs = x * S_enc."""
    if FP16_DOMAIN:
        # The product has six significant bits: its cast to fp16 and back is exact, and so is the fused product.
        return tl.fma(q, scale, -xs)
    elif FAST:
        # Rounding commutes with powers of two: q = p or 1.5 p dequantises to p times the value of 1 or of 1.5.
        bits = q.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        return tl.fma(power, tl.where((bits & 0x400000) != 0, three_halves, one), -x)
    else:
        return tl.div_rn((q * scale) * amax, numerator) - x


@triton.jit
def _error(d, MSE: tl.constexpr):
    if MSE:
        return d * d
    else:
        return tl.abs(d)


@triton.jit
def _quantize_4over6(
    m, a, amax, s_enc, s_dec, numerator, recip,
    PTX: tl.constexpr, FAST: tl.constexpr, FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr,
):  # fmt: skip
    """E2M1 magnitudes (16 fp32) and block scale of the candidate with the smaller error; ties keep the map to 6."""
    if FAST:
        s6 = _divide(a, 6.0, ONE_SIXTH) * s_enc
    else:
        s6 = tl.div_rn(a, 6.0) * s_enc
    scale6 = _e4m3(s6)
    scale4 = _e4m3(s6 * 1.5)
    inv6 = _inverse(scale6, s_dec, PTX)
    inv4 = _inverse(scale4, s_dec, PTX)
    one6 = _divide(scale6 * amax, numerator, recip)
    one4 = _divide(scale4 * amax, numerator, recip)
    half6 = _divide((1.5 * scale6) * amax, numerator, recip)
    half4 = _divide((1.5 * scale4) * amax, numerator, recip)
    error6 = a * 0.0
    error4 = a * 0.0
    q6 = ()
    q4 = ()
    for i in tl.static_range(16):
        xs = m[i] * s_enc
        r6 = _e2m1(m[i], inv6)
        r4 = _e2m1(m[i], inv4)
        error6 += _error(_difference(r6, scale6, one6, half6, m[i], xs, amax, numerator, FAST, FP16_DOMAIN), MSE)
        error4 += _error(_difference(r4, scale4, one4, half4, m[i], xs, amax, numerator, FAST, FP16_DOMAIN), MSE)
        q6 = q6 + (r6,)
        q4 = q4 + (r4,)
    four = error4 < error6
    q = ()
    for i in tl.static_range(16):
        q = q + (tl.where(four, q4[i], q6[i]),)
    return q, tl.where(four, scale4, scale6)


@triton.jit
def _quantize_standard(m, a, s_enc, s_dec, PTX: tl.constexpr):
    """E2M1 magnitudes (16 fp32) and block scale (fp32 value of an E4M3)."""
    scale = _e4m3(a * (s_enc * ONE_SIXTH))
    inv = _inverse(scale, s_dec, PTX)
    q = ()
    for i in tl.static_range(16):
        q = q + (_e2m1(m[i], inv),)
    return q, scale


@triton.jit
def _quantize_store(
    x, dst, start, blocks, amax, s_enc, s_dec, numerator, recip,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FAST: tl.constexpr, FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise, dequantise and store ROWS blocks given as eight words; returns the bits of each block's max abs."""
    m = _row_magnitudes(x, FP16)
    bits = _max_bits(m)
    a = bits.to(tl.float32, bitcast=True)
    if FOUR_OVER_SIX:
        q, scale = _quantize_4over6(m, a, amax, s_enc, s_dec, numerator, recip, PTX, FAST, FP16_DOMAIN, MSE)
    else:
        q, scale = _quantize_standard(m, a, s_enc, s_dec, PTX)
    if TE_DECODE:
        factor = (scale * amax) * recip
    else:
        factor = scale * s_dec
    y = ()
    for i in tl.static_range(8):
        word = _pack(q[2 * i] * factor, q[2 * i + 1] * factor, FP16, PTX)
        y = y + (word | (x[i] & -2147450880),)  # both sign bits, also of zeros
    _store(dst, start, blocks, y, WIDE, ROWS)
    return bits


@triton.jit
def _scales(amax, numerator):
    """S_enc and S_dec of a tensor maximum."""
    s_enc = tl.minimum(tl.div_rn(numerator, amax), FLT_MAX)
    s_enc = tl.where((amax == 0.0) | (s_enc == 0.0), 1.0, s_enc)
    return s_enc, tl.div_rn(1.0, s_enc)


@triton.jit
def _entry(table, n, weight):
    """(source offset and output offset in 16-byte units, blocks, amax slot, first chunk) of one weight in the table.

    Addresses are offsets from one base pointer: the compiler then knows the 16-byte alignment.
    """
    row = table + weight
    return tl.load(row), tl.load(row + n), tl.load(row + 2 * n), tl.load(row + 3 * n), tl.load(row + 4 * n)


@triton.jit
def amax_kernel(base, table, chunk_weight, amax_bits, n, ROWS: tl.constexpr, TILES: tl.constexpr, FP16: tl.constexpr):
    """Integer max of the fp32 bits of |x| per slot (int32, zero at start): free of order, so exact."""
    chunk = tl.program_id(0)
    src, _out, blocks, slot, first_chunk = _entry(table, n, tl.load(chunk_weight + chunk))
    words = base + src * 4
    start = (chunk - first_chunk) * ROWS
    stride = tl.cdiv(tl.cdiv(blocks, ROWS), TILES) * ROWS
    best = tl.zeros((ROWS,), tl.int32)
    for t in range(TILES):
        first, second = _load(words, start + t * stride, blocks, ROWS)
        best = tl.maximum(best, _max_bits(_row_magnitudes(_words(first, second, ROWS), FP16)))
    tl.atomic_max(amax_bits + slot, tl.max(best, axis=0), sem="relaxed")


@triton.jit
def _chunk(
    src, dst, start, stride, tiles, blocks, amax, numerator, recip, flag,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FAST: tl.constexpr, FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr,
    WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`tiles` tiles from block `start`, `stride` blocks apart: neighbouring programs stay side by side in memory."""
    s_enc, s_dec = _scales(amax, numerator)
    worst = tl.zeros((ROWS,), tl.int32)
    if AHEAD:
        first, second = _load(src, start, blocks, ROWS)
    for t in range(tiles):
        here = start + t * stride
        if AHEAD:
            next_first, next_second = _load(src, here + stride, tl.where(t + 1 < tiles, blocks, 0), ROWS)
        else:
            first, second = _load(src, here, blocks, ROWS)
        bits = _quantize_store(
            _words(first, second, ROWS), dst, here, blocks, amax, s_enc, s_dec, numerator, recip,
            ROWS, FP16, PTX, FOUR_OVER_SIX, FAST, FP16_DOMAIN, MSE, TE_DECODE, WIDE,
        )  # fmt: skip
        worst = tl.maximum(worst, bits)
        if AHEAD:
            first = next_first
            second = next_second
    _raise_flag(flag, worst, amax, TE_DECODE, ROWS)


@triton.jit
def _raise_flag(flag, worst, amax, TE_DECODE: tl.constexpr, ROWS: tl.constexpr):
    """Bit 0: a block holds NaN or infinity. Bit 1: `te` overflows. Lane by lane: no reduction in the usual case."""
    tl.atomic_or(flag + tl.zeros((ROWS,), tl.int32), 1, mask=worst >= 0x7F800000, sem="relaxed")
    if TE_DECODE:
        if amax * 448.0 > FLT_MAX:
            tl.atomic_or(flag, 2, sem="relaxed")


@triton.jit
def _out_of_range(amax):
    """True where some value of the fast 4over6 divisions could leave the normal fp32 numbers.

    Inside the range a block so small that a / 6 is subnormal gets scale 0 with either quotient.
    """
    return (amax < 8.6736174e-19) | (amax > 1.1529215e18)


@triton.jit
def qdq_kernel(
    base, table, out, amax_bits, flag, n, chunk_weight, chunks, numerator, recip,
    ROWS: tl.constexpr, TILES: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Quantise and dequantise; chunks run last to first, so that what an amax pass left in L2 is read first.

    4over6 leaves weights with an extreme maximum to `extreme_kernel`.
    """
    chunk = chunks - 1 - tl.program_id(0)
    src, dst, blocks, slot, first_chunk = _entry(table, n, tl.load(chunk_weight + chunk))
    amax = tl.load(amax_bits + slot).to(tl.float32, bitcast=True)
    if FOUR_OVER_SIX:
        if _out_of_range(amax):
            return
    start = (chunk - first_chunk) * ROWS
    stride = tl.cdiv(tl.cdiv(blocks, ROWS), TILES) * ROWS
    _chunk(
        base + src * 4, out + dst * 4, start, stride, TILES, blocks, amax, numerator, recip, flag,
        ROWS, FP16, PTX, FOUR_OVER_SIX, True, FP16_DOMAIN, MSE, TE_DECODE, WIDE, AHEAD,
    )  # fmt: skip


@triton.jit
def extreme_kernel(
    base, table, out, amax_bits, flag, n, numerator, recip,
    ROWS: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr,
    TE_DECODE: tl.constexpr,
):  # fmt: skip
    """4over6 for weights with an extreme maximum: full divisions. A few programs share all weights."""
    for weight in range(n):
        src, dst, blocks, slot, _first = _entry(table, n, weight)
        amax = tl.load(amax_bits + slot).to(tl.float32, bitcast=True)
        if _out_of_range(amax):
            stride = tl.num_programs(0) * ROWS
            tiles = tl.cdiv(blocks, stride).to(tl.int32)
            _chunk(
                base + src * 4, out + dst * 4, tl.program_id(0).to(tl.int64) * ROWS, stride, tiles, blocks, amax,
                numerator, recip, flag, ROWS, FP16, PTX, True, False, FP16_DOMAIN, MSE, TE_DECODE, False, False,
            )  # fmt: skip
