"""Number formats of the low-precision kernels, bit by bit: E2M1, E4M3 (fn), E8M0, and E2M1 packing.

Plain torch on integer views of fp32: no hardware or library cast decides a rounding, so the same bits come out
on every device. Codes are uint8. All encoders take fp32 of any shape and keep the shape. What a block, a scale
or a tensor means is not here: see `miles.quant.codecs`.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0, OCP 8-bit Floating Point v1.0 for E4M3.
"""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 255
FLT_MAX = float(torch.finfo(torch.float32).max)

_ABS = 0x7FFFFFFF
_INF = 0x7F800000


def _bits(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"expected a float32 tensor, got {x.dtype}")
    return x.contiguous().view(torch.int32)


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> E2M1 codes 0..15 (uint8), round to nearest even, saturating at 6; the sign of zero is kept.

    NaN is outside the format; its magnitude compares false everywhere and becomes a signed zero, so callers
    reject non-finite input first.
    """
    m = x.abs()
    code = (m > 0.25).to(torch.uint8)
    code += m >= 0.75
    code += m > 1.25
    code += m >= 1.75
    code += m > 2.5
    code += m >= 3.5
    code += m > 5.0
    return code | ((_bits(x) < 0).to(torch.uint8) << 3)


def e2m1_decode(code: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 -> fp32; code 8 is -0."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=code.device)
    return table[code.long()]


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> E4M3 codes (uint8), round to nearest even; beyond 448 (and infinity) saturates, NaN -> 0x7f | sign."""
    bits = _bits(x)
    a = bits & _ABS
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14 leaves 2^-9 as the last mantissa bit: the hardware adder rounds to the subnormal grid.
    small = (x.abs() + 16384.0).contiguous().view(torch.int32) - 0x46800000
    code = torch.where(a < 0x3C800000, small, normal).clamp_max(0x7E)
    code = torch.where(a > _INF, E4M3_NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def e4m3_decode(code: torch.Tensor) -> torch.Tensor:
    """E4M3 codes (uint8) -> fp32; 0x7f and 0xff are NaN."""
    c = code.to(torch.int32)
    magnitude = c & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).view(torch.float32)
    value = torch.where(magnitude < 8, magnitude.to(torch.float32) * 2.0**-9, normal)
    value = torch.where(magnitude == E4M3_NAN, torch.nan, value)
    return torch.where(c >= 0x80, -value, value)


def e8m0_encode(v: torch.Tensor) -> torch.Tensor:
    """fp32 >= 0 -> E8M0 codes (uint8), rounded **up** to a power of two; the sign is ignored.

    0 -> 0, infinity -> 254, NaN -> 255. The largest exponent does not round up, and subnormals up to 2^-127
    (mantissa 0x400000) are code 0.
    """
    a = _bits(v) & _ABS
    exponent, mantissa = a >> 23, a & 0x7FFFFF
    stay = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    code = exponent + (~stay).to(torch.int32)
    code = torch.where(a == _INF, 254, code)
    return torch.where(a > _INF, E8M0_NAN, code).to(torch.uint8)


def e8m0_decode(code: torch.Tensor) -> torch.Tensor:
    """E8M0 codes (uint8) -> fp32 2^(code-127); code 0 is the subnormal 2^-127, 255 is NaN."""
    c = code.to(torch.int32)
    bits = torch.where(c == 0, 0x400000, c << 23)
    return torch.where(c == E8M0_NAN, torch.nan, bits.view(torch.float32))


def e8m0_inverse(code: torch.Tensor) -> torch.Tensor:
    """E8M0 codes (uint8) -> fp32 2^(127-code); 254 gives the subnormal 2^-127, 255 is NaN."""
    c = code.to(torch.int32)
    return torch.where(c == E8M0_NAN, torch.nan, e8m0_decode((254 - c).clamp_min(0).to(torch.uint8)))


def pack_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] -> bytes [..., K/2]; the low nibble is the even column. K must be even."""
    if code.shape[-1] % 2:
        raise ValueError(f"pack_e2m1 needs an even last dimension, got shape {tuple(code.shape)}")
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K/2] (uint8 or int8) -> codes [..., K] (uint8); the low nibble is the even column."""
    byte = packed.view(torch.uint8) if packed.dtype == torch.int8 else packed
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)
