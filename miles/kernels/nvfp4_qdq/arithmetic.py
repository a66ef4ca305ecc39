"""Exact fp32 arithmetic of NVFP4 in Triton: rounding to E2M1 and E4M3, reciprocals, division, 16-bit words.

Rounding is done by adding a power of two that leaves the wanted mantissa bits (E2M1: one, E4M3: three), which is exact
round to nearest even in the hardware adder. `PTX` selects NVIDIA forms of the same arithmetic (packed conversion,
Markstein division, a reciprocal without its test for extreme arguments); without it everything is portable and runs
in the interpreter. Kernels that use this must be compiled without FMA contraction.
"""

# ruff: noqa: RUF005  (the Triton front end has no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(0.16666667163372040)


@triton.jit
def round_mantissa(m: tl.tensor, BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr) -> tl.tensor:
    """m >= 0 fp32 -> nearest value with BITS mantissa bits and exponents from MIN_EXPONENT, ties to even."""
    shift: tl.constexpr = (23 - BITS) << 23
    floor: tl.constexpr = (MIN_EXPONENT + 127 + 23 - BITS) << 23
    magic = tl.maximum((m.to(tl.int32, bitcast=True) & 0x7F800000) + shift, floor).to(tl.float32, bitcast=True)
    return (m + magic) - magic


@triton.jit
def e2m1(x: tl.tensor, inv: tl.tensor) -> tl.tensor:
    """x * inv (x >= 0) rounded to an E2M1 magnitude 0..6, as fp32."""
    return round_mantissa(tl.minimum(x * inv, 6.0), 1, 0)


@triton.jit
def e4m3(s: tl.tensor) -> tl.tensor:
    """s >= 0 rounded to an E4M3 magnitude 0..448, as fp32."""
    return round_mantissa(tl.minimum(s, 448.0), 3, -6)


@triton.jit
def inverse_scale(scale: tl.tensor, s_dec: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """1 / (scale * S_dec), rounded to nearest, infinity limited to FLT_MAX."""
    product = scale * s_dec
    if PTX:
        inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [product], tl.float32, True, 1)
    else:
        inverse = tl.div_rn(1.0, product)
    return tl.minimum(inverse, FLT_MAX)


@triton.jit
def quick_inverse_scale(scale: tl.tensor, s_dec: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """`inverse_scale` of a normal product far from the ends of the range; 0 for scale 0, whose block decodes to 0 anyway."""
    product = scale * s_dec
    if PTX:
        # The compiler's own reciprocal without its test for extreme arguments: seed, residual, correction.
        seed = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [product], tl.float32, True, 1)
        inverse = tl.fma(tl.fma(-product, seed, 1.0), seed, seed)
    else:
        inverse = tl.div_rn(1.0, product)
    return tl.where(scale > 0.0, inverse, 0.0)


@triton.jit
def divide(n: tl.tensor, numerator: tl.tensor, recip: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """n / numerator correctly rounded, by Markstein's theorem: `recip` is the rounded reciprocal, all values normal."""
    if PTX:
        quotient = n * recip
        return tl.fma(tl.fma(-quotient, numerator, n), recip, quotient)
    else:
        return tl.div_rn(n, numerator)


@triton.jit
def tensor_scales(amax: tl.tensor, numerator: tl.tensor) -> tl.tuple:
    """S_enc and S_dec of a tensor maximum."""
    s_enc = tl.minimum(tl.div_rn(numerator, amax), FLT_MAX)
    s_enc = tl.where((amax == 0.0) | (s_enc == 0.0), 1.0, s_enc)
    return s_enc, tl.div_rn(1.0, s_enc)


@triton.jit
def magnitudes(word: tl.tensor, FP16: tl.constexpr) -> tl.tuple:
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
def row_magnitudes(x: tl.tensor, FP16: tl.constexpr) -> tl.tuple:
    """Eight words -> 16 magnitudes."""
    m = ()
    for i in tl.static_range(8):
        low, high = magnitudes(x[i], FP16)
        m = m + (low, high)  # type: ignore[assignment]  # unrolled: longer by each pass
    return m


@triton.jit
def max_bits(m: tl.tensor) -> tl.tensor:
    """Largest of 16 magnitudes per row, as the bits of an fp32 (NaN and infinity are the largest)."""
    best = tl.maximum(m[0].to(tl.int32, bitcast=True), m[1].to(tl.int32, bitcast=True))
    for i in tl.static_range(1, 8):
        best = tl.maximum(
            tl.maximum(best, m[2 * i].to(tl.int32, bitcast=True)), m[2 * i + 1].to(tl.int32, bitcast=True)
        )
    return best


@triton.jit
def pack(low: tl.tensor, high: tl.tensor, FP16: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:
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
