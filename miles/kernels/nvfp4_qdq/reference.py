"""NVFP4 of weights in plain torch fp32: the one written-down order of operations that every kernel must equal.

Blocks of 16 along the last dimension, one E4M3 scale per block, one fp32 scale per tensor. Every operation is a
separate fp32 operation rounded to nearest even: no FMA contraction, no flush to zero. It leaves out checks of the
input (`miles.quant.codecs.nvfp4` and `api` do them) and sharding (the tensor maximum A is an argument).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.kernels.formats import FLT_MAX, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

BLOCK = 16
ONE_SIXTH = 0.16666667163372040  # fp32 0x3E2AAAAB


@dataclass(frozen=True)
class Blocks:
    """Codes uint8 [..., K/16, 16], E4M3 scale bytes uint8 [..., K/16], and S_dec, A as fp32 scalars [G...]."""

    codes: torch.Tensor
    scale8: torch.Tensor
    s_dec: torch.Tensor
    amax: torch.Tensor


def tensor_amax(weight: torch.Tensor) -> torch.Tensor:
    """Max abs as fp32: scalar for [M, K], [G] for [G, M, K]."""
    dims = (-2, -1) if weight.dim() == 3 else tuple(range(weight.dim()))
    return weight.abs().amax(dim=dims).float()


def _fp32(value: float, like: torch.Tensor) -> torch.Tensor:
    # A device scalar: torch on CUDA turns division by a Python number into a multiplication by its reciprocal.
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def tensor_scales(amax: torch.Tensor, config: NVFP4QDQConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(S_enc, S_dec) of step 1; S_dec may be subnormal."""
    s_enc = torch.clamp_max(_fp32(config.encode_numerator, amax) / amax, FLT_MAX)
    s_enc = torch.where((amax == 0) | (s_enc == 0), 1.0, s_enc)
    return s_enc, 1.0 / s_enc


def _encode(x: torch.Tensor, scale8: torch.Tensor, s_dec: torch.Tensor) -> torch.Tensor:
    inv = torch.clamp_max(1.0 / (e4m3_decode(scale8) * s_dec), FLT_MAX)
    return e2m1_encode((x * inv.unsqueeze(-1)).clamp(-6.0, 6.0))


def candidate_error(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale8: torch.Tensor,
    amax: torch.Tensor,
    s_enc: torch.Tensor,
    config: NVFP4QDQConfig,
) -> torch.Tensor:
    """Error of one 4over6 candidate per block, added left to right over the 16 elements."""
    product = e2m1_decode(codes) * e4m3_decode(scale8).unsqueeze(-1)
    if config.error_use_fast_math:
        d = product.half().float() - x * s_enc.unsqueeze(-1)
    else:
        d = (product * amax.unsqueeze(-1)) / _fp32(config.encode_numerator, x) - x
    terms = d.abs() if config.error_mode is ErrorMode.MAE else d * d
    total = terms[..., 0].clone()
    for i in range(1, BLOCK):
        total = total + terms[..., i]
    return total


def quantize_blocks(weight: torch.Tensor, amax: torch.Tensor, config: NVFP4QDQConfig) -> Blocks:
    """Steps 1 to 3 for [M, K] with scalar A, or [G, M, K] with A [G]; K a multiple of 16."""
    amax = amax.float()
    s_enc, s_dec = tensor_scales(amax, config)
    if weight.dim() == 3:
        amax, s_enc, s_dec = (t.reshape(-1, 1, 1) for t in (amax, s_enc, s_dec))
    x = weight.float().unflatten(-1, (-1, BLOCK))
    a = x.abs().amax(-1)
    if not config.use_4over6:
        scale8 = e4m3_encode(a * (s_enc * ONE_SIXTH))
        scale8 = torch.where(a == 0, 0, scale8).to(torch.uint8)
        return Blocks(_encode(x, scale8, s_dec), scale8, s_dec, amax)

    s6 = (a / _fp32(6.0, a)) * s_enc
    scale6 = e4m3_encode(s6.clamp_max(448.0))
    scale4 = e4m3_encode((s6 * 1.5).clamp_max(448.0))
    codes6, codes4 = _encode(x, scale6, s_dec), _encode(x, scale4, s_dec)
    error6 = candidate_error(x, codes6, scale6, amax, s_enc, config)
    error4 = candidate_error(x, codes4, scale4, amax, s_enc, config)
    use4 = error4 < error6
    codes = torch.where(use4.unsqueeze(-1), codes4, codes6)
    return Blocks(codes, torch.where(use4, scale4, scale6), s_dec, amax)


def dequantize_blocks(blocks: Blocks, config: NVFP4QDQConfig) -> torch.Tensor:
    """Step 4 in fp32, before the cast to the output type: [..., K]."""
    scale = e4m3_decode(blocks.scale8)
    if config.decode == "te":
        factor = (scale * blocks.amax) * _fp32(1.0 / config.encode_numerator, scale)
    else:
        factor = scale * blocks.s_dec
    return (e2m1_decode(blocks.codes) * factor.unsqueeze(-1)).flatten(-2)


def qdq(weight: torch.Tensor, config: NVFP4QDQConfig, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise and dequantise [M, K] or [G, M, K] (bf16, fp16 or fp32); same shape and dtype, signed zeros kept."""
    amax = tensor_amax(weight) if amax is None else amax
    return dequantize_blocks(quantize_blocks(weight, amax, config), config).to(weight.dtype)
