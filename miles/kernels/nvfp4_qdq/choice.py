"""Block scale and E2M1 magnitudes of a block of 16: the standard rounding, and 4over6 in two forms.

`choose_exact` computes both candidates' errors operation by operation as the reference does. `choose_quickly` computes
them with fused operations, in the domain of the values whatever the configuration's, and says where the difference
is too small for that: there the exact form decides. Rows it is sure of have the exact form's result.
"""

# ruff: noqa: RUF005  (the Triton front end has no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from miles.kernels.nvfp4_qdq.arithmetic import (
    ONE_SIXTH,
    divide,
    e2m1,
    e4m3,
    inverse_scale,
    quick_inverse_scale,
    round_mantissa,
)

# What two quick errors can be apart from the reference's (derivation: docs/decisions/0801): multiples of the block's
# maximum (or its square) and of the sum of both errors.
ABSOLUTE_BOUND = tl.constexpr((192 * 2.0**-24, 48 * 2.0**-24))
SQUARE_BOUND = tl.constexpr((16 * 2.0**-24, 160 * 2.0**-24))


@triton.jit
def quantize_standard(m: tl.tensor, a: tl.tensor, s_enc: tl.tensor, s_dec: tl.tensor, PTX: tl.constexpr) -> tl.tuple:
    """E2M1 magnitudes (16 fp32) and block scale (fp32 value of an E4M3)."""
    scale = e4m3(a * (s_enc * ONE_SIXTH))
    inv = inverse_scale(scale, s_dec, PTX)
    q = ()
    for i in tl.static_range(16):
        q = q + (e2m1(m[i], inv),)  # type: ignore[assignment]  # unrolled: longer by each pass
    return q, scale


@triton.jit
def _two_scales(a: tl.tensor, s_enc: tl.tensor, FAST: tl.constexpr, PTX: tl.constexpr) -> tl.tuple:
    """Block scales that map the block's maximum to 6 and to 4."""
    if FAST:
        s6 = divide(a, 6.0, ONE_SIXTH, PTX) * s_enc
    else:
        s6 = tl.div_rn(a, 6.0) * s_enc
    return e4m3(s6), e4m3(s6 * 1.5)


@triton.jit
def _difference(
    q: tl.tensor,
    scale: tl.tensor,
    one: tl.tensor,
    three_halves: tl.tensor,
    x: tl.tensor,
    xs: tl.tensor,
    amax: tl.tensor,
    numerator: tl.tensor,
    FAST: tl.constexpr,
    FP16_DOMAIN: tl.constexpr,
) -> tl.tensor:
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
def _error(d: tl.tensor, MSE: tl.constexpr) -> tl.tensor:
    if MSE:
        return d * d
    else:
        return tl.abs(d)


@triton.jit
def choose_exact(
    m: tl.tensor, a: tl.tensor, amax: tl.tensor, s_enc: tl.tensor, s_dec: tl.tensor, numerator: tl.tensor, recip: tl.tensor,
    PTX: tl.constexpr, FAST: tl.constexpr, FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """E2M1 magnitudes (16 fp32) and block scale of the candidate with the smaller error; ties keep the map to 6."""
    scale6, scale4 = _two_scales(a, s_enc, FAST, PTX)
    inv6 = inverse_scale(scale6, s_dec, PTX)
    inv4 = inverse_scale(scale4, s_dec, PTX)
    one6 = divide(scale6 * amax, numerator, recip, PTX)
    one4 = divide(scale4 * amax, numerator, recip, PTX)
    half6 = divide((1.5 * scale6) * amax, numerator, recip, PTX)
    half4 = divide((1.5 * scale4) * amax, numerator, recip, PTX)
    error6 = a * 0.0
    error4 = a * 0.0
    q6 = ()
    q4 = ()
    for i in tl.static_range(16):
        xs = m[i] * s_enc
        r6 = e2m1(m[i], inv6)
        r4 = e2m1(m[i], inv4)
        error6 += _error(_difference(r6, scale6, one6, half6, m[i], xs, amax, numerator, FAST, FP16_DOMAIN), MSE)
        error4 += _error(_difference(r4, scale4, one4, half4, m[i], xs, amax, numerator, FAST, FP16_DOMAIN), MSE)
        q6 = q6 + (r6,)  # type: ignore[assignment]  # unrolled: longer by each pass
        q4 = q4 + (r4,)  # type: ignore[assignment]  # unrolled: longer by each pass
    four = error4 < error6
    q = ()
    for i in tl.static_range(16):
        q = q + (tl.where(four, q4[i], q6[i]),)  # type: ignore[assignment]  # unrolled: longer by each pass
    return q, tl.where(four, scale4, scale6)


@triton.jit
def choose_quickly(
    m: tl.tensor,
    a: tl.tensor,
    amax: tl.tensor,
    s_enc: tl.tensor,
    s_dec: tl.tensor,
    recip: tl.tensor,
    PTX: tl.constexpr,
    MSE: tl.constexpr,
) -> tl.tuple:
    """As `choose_exact`, by errors that are only nearly the reference's; third result: rows where that may not do.

    Without saturation, which a normal scale never needs (x * inv <= 6.375), nor does a zero one given inverse 0.
    """
    scale6, scale4 = _two_scales(a, s_enc, True, PTX)
    inv6 = quick_inverse_scale(scale6, s_dec, PTX)
    inv4 = quick_inverse_scale(scale4, s_dec, PTX)
    one6 = (scale6 * amax) * recip
    one4 = (scale4 * amax) * recip
    error6 = a * 0.0
    error4 = a * 0.0
    q6 = ()
    q4 = ()
    for i in tl.static_range(16):
        r6 = round_mantissa(m[i] * inv6, 1, 0)
        r4 = round_mantissa(m[i] * inv4, 1, 0)
        d6 = tl.fma(r6, one6, -m[i])
        d4 = tl.fma(r4, one4, -m[i])
        if MSE:
            error6 = tl.fma(d6, d6, error6)
            error4 = tl.fma(d4, d4, error4)
        else:
            error6 += tl.abs(d6)
            error4 += tl.abs(d4)
        q6 = q6 + (r6,)  # type: ignore[assignment]  # unrolled: longer by each pass
        q4 = q4 + (r4,)  # type: ignore[assignment]  # unrolled: longer by each pass
    if MSE:
        bound = tl.fma(error4 + error6, SQUARE_BOUND[1], (a * a) * SQUARE_BOUND[0])
    else:
        bound = tl.fma(error4 + error6, ABSOLUTE_BOUND[1], a * ABSOLUTE_BOUND[0])
    four = error4 < error6
    unsure = ((tl.abs(error4 - error6) <= bound) | (scale6 < 0.015625) | (a > amax)) & (scale4 > 0.0)
    q = ()
    for i in tl.static_range(16):
        q = q + (tl.where(four, q4[i], q6[i]),)  # type: ignore[assignment]  # unrolled: longer by each pass
    return q, tl.where(four, scale4, scale6), unsure


@triton.jit
def out_of_range(amax: tl.tensor) -> tl.tensor:
    """True where some value of the fast 4over6 divisions could leave the normal fp32 numbers.

    Inside the range a block so small that a / 6 is subnormal gets scale 0 with either quotient.
    """
    return (amax < 9.3132257e-10) | (amax > 1.0737418e9)
