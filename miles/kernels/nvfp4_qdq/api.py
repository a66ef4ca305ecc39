"""`qdq_nvfp4`: quantise and dequantise a list of weights in one launch (two when the maxima are not given).

Runs on CUDA (compute capability 8.0 or newer), on HIP, and on CPU tensors when Triton interprets. Results equal
`reference.qdq` bit for bit. Nothing is read back from the device: a non-finite weight raises a flag that
`raise_if_flagged` reads, once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from triton.runtime.interpreter import InterpretedFunction

from miles.kernels.nvfp4_qdq import kernel
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.kernels.weight_table import WeightTable, on_device, weight_table

BLOCK = 16
_flags: dict[torch.device, torch.Tensor] = {}
_compiled: set[tuple] = set()


@dataclass(frozen=True)
class Launch:
    """How work is cut: blocks of 16 per tile, tiles per program, warps per program, and two forms of the kernel.

    `wide`: exchange halves between lanes so that a store fills whole memory sectors; `ahead`: load the next tile
    before the current one is computed. The defaults below were the fastest on an H200 (docs/guide/low-precision.md).
    """

    rows: int
    tiles: int
    warps: int
    wide: bool = True
    ahead: bool = False


STANDARD_LAUNCH = Launch(rows=64, tiles=8, warps=2)
FOUR_OVER_SIX_LAUNCH = Launch(rows=64, tiles=8, warps=2, ahead=True)
AMAX_LAUNCH = Launch(rows=256, tiles=8, warps=8)
INTERPRETER_LAUNCH = Launch(rows=512, tiles=1, warps=4)
EXTREME_PROGRAMS = 528
KEEP_BYTES = 24 << 20


def _default_launch(config: NVFP4QDQConfig) -> Launch:
    if _interpreted():
        return INTERPRETER_LAUNCH
    return FOUR_OVER_SIX_LAUNCH if config.use_4over6 else STANDARD_LAUNCH


def _interpreted() -> bool:
    return isinstance(kernel.qdq_kernel, InterpretedFunction)


def _check(weights: Sequence[torch.Tensor]) -> None:
    if not weights:
        raise ValueError("qdq_nvfp4 needs at least one weight, got an empty list")
    first = weights[0]
    for i, w in enumerate(weights):
        where = f"weights[{i}] of shape {tuple(w.shape)}"
        if w.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"{where}: dtype {w.dtype} is not bfloat16 or float16")
        if w.dtype != first.dtype or w.device != first.device:
            raise TypeError(
                f"{where}: {w.dtype} on {w.device} differs from weights[0], {first.dtype} on {first.device}"
            )
        if w.dim() not in (2, 3):
            raise ValueError(f"{where}: expected [M, K], or [G, M, K] with one scale per group")
        if w.numel() == 0 or w.shape[-1] % BLOCK:
            raise ValueError(f"{where}: must be non-empty with the last dimension a multiple of {BLOCK}")
        if not w.is_contiguous():
            raise ValueError(f"{where}: must be contiguous, strides are {w.stride()}")
        if w.data_ptr() % 16:
            raise ValueError(f"{where}: its address must be 16-byte aligned")
    if first.device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(first.device) < (8, 0):
            raise TypeError(f"qdq_nvfp4 needs compute capability 8.0 or newer, {first.device} has less")
    elif not _interpreted():
        raise TypeError(f"weights on {first.device}: use reference.qdq, or set TRITON_INTERPRET=1 before the import")


def _slots(weights: Sequence[torch.Tensor], shared: Sequence[int] | None) -> list[int]:
    groups = [w.shape[0] if w.dim() == 3 else 1 for w in weights]
    total = sum(groups)
    if shared is None:
        return list(range(total))
    slots = list(shared)
    if len(slots) != total or sorted(set(slots)) != list(range(max(slots) + 1)):
        raise ValueError(f"shared must give a slot 0..n-1 without gaps for each of the {total} matrices, got {slots}")
    return slots


def _table(weights: Sequence[torch.Tensor], slots: list[int], launch: Launch) -> WeightTable:
    sources, outputs, blocks = [], [], []
    base, output = weights[0].data_ptr(), 0
    for w in weights:
        groups = w.shape[0] if w.dim() == 3 else 1
        size = w.numel() // groups
        for g in range(groups):
            sources.append((w.data_ptr() + g * size * 2 - base) // 16)
            outputs.append(output)
            blocks.append(size // BLOCK)
            output += size // 8
    return weight_table((sources, outputs, blocks, slots), blocks, launch.rows * launch.tiles, weights[0].device)


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(-1).view(torch.int32)


def _flag(device: torch.device) -> torch.Tensor:
    if device not in _flags:
        _flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _flags[device]


def _refuse_compile_in_capture(key: tuple, device: torch.device) -> None:
    if key in _compiled:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "first compile of qdq_nvfp4 inside a graph capture: call once before the capture (warm up first)"
        )
    _compiled.add(key)


def amax_nvfp4(
    weights: Sequence[torch.Tensor], *, shared: Sequence[int] | None = None, launch: Launch | None = None
) -> torch.Tensor:
    """Max abs per matrix, fp32 [slots], exact. `shared[i]` puts matrix i into a slot (gate and up share one).

    Under expert tensor parallelism, all-reduce the result with MAX before `qdq_nvfp4(..., amax=)`.
    """
    _check(weights)
    return _amax(weights, _slots(weights, shared), launch or (INTERPRETER_LAUNCH if _interpreted() else AMAX_LAUNCH))


def _early(device: torch.device) -> bool:
    """Whether a kernel may start before the end of the one before it (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _amax(
    weights: Sequence[torch.Tensor], slots: list[int], launch: Launch, *, keep: int = 0, early: bool = False
) -> torch.Tensor:
    """`keep`: bytes at the end that shall stay in L2; `early`: the next kernel waits for this one by itself."""
    table = _table(weights, slots, launch)
    device, fp16 = weights[0].device, weights[0].dtype == torch.float16
    keep_from = max(table.chunks - keep // (launch.rows * launch.tiles * BLOCK * 2), 0)
    _refuse_compile_in_capture(("amax", device, fp16, launch, early), device)
    bits = torch.empty(max(slots) + 1, dtype=torch.int32, device=device)
    pdl = {"launch_pdl": True} if early else {}
    with on_device(device):
        kernel.reset_kernel[(1,)](bits, bits.numel(), SLOTS=128, EARLY=early, num_warps=4)
        kernel.amax_kernel[(table.chunks,)](
            _words(weights[0]), table.columns, table.chunk_weight, bits, table.n, keep_from,
            ROWS=launch.rows, TILES=launch.tiles, FP16=fp16, EARLY=early, num_warps=launch.warps, enable_fp_fusion=False, **pdl,
        )  # fmt: skip
    return bits.view(torch.float32)


def qdq_nvfp4(
    weights: Sequence[torch.Tensor],
    config: NVFP4QDQConfig,
    amax: torch.Tensor | None = None,
    *,
    shared: Sequence[int] | None = None,
    launch: Launch | None = None,
) -> list[torch.Tensor]:
    """Quantise and dequantise each weight; same shapes, dtype and device, in one new allocation.

    `weights`: bf16 or fp16, contiguous, 16-byte aligned, [M, K] or [G, M, K] (one scale per group), K % 16 = 0.
    `amax`: fp32 [slots], as `amax_nvfp4` returns; None computes it. `shared`: see `amax_nvfp4`.
    """
    _check(weights)
    launch = launch or _default_launch(config)
    if launch.tiles > 32:
        raise ValueError(
            f"launch.tiles must be at most 32 (one bit each marks a tile to be done again), got {launch.tiles}"
        )
    slots = _slots(weights, shared)
    device, dtype = weights[0].device, weights[0].dtype
    early = amax is None and _early(device)
    # What the maxima left in L2 shall not have to make room for results.
    write = "" if amax is not None else "evict_first"
    if amax is None:
        # The same number of tiles: the last places the maxima read are then the first ones that are read again.
        first = INTERPRETER_LAUNCH if _interpreted() else replace(AMAX_LAUNCH, tiles=launch.tiles)
        amax = _amax(weights, slots, first, keep=KEEP_BYTES, early=early)
    elif amax.dtype != torch.float32 or amax.shape != (max(slots) + 1,) or amax.device != device:
        raise ValueError(
            f"amax must be float32 of shape ({max(slots) + 1},) on {device}, got {amax.dtype} {tuple(amax.shape)} on {amax.device}"
        )
    table = _table(weights, slots, launch)
    _refuse_compile_in_capture(("qdq", device, dtype, launch, config, early), device)
    flat = torch.empty(sum(w.numel() for w in weights), dtype=dtype, device=device)
    numerator = config.encode_numerator
    pointers = (
        _words(weights[0]),
        table.columns,
        _words(flat),
        amax.contiguous().view(torch.int32),
        _flag(device),
        table.n,
    )
    fixed = {
        "ROWS": launch.rows, "FP16": dtype == torch.float16, "PTX": device.type == "cuda" and torch.version.hip is None,
        "FP16_DOMAIN": config.error_use_fast_math, "MSE": config.error_mode is ErrorMode.MSE, "TE_DECODE": config.decode == "te",
        "num_warps": launch.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    with on_device(device):
        kernel.qdq_kernel[(table.chunks,)](
            *pointers, table.chunk_weight, table.chunks, numerator, 1.0 / numerator,
            TILES=launch.tiles, FOUR_OVER_SIX=config.use_4over6,
            WIDE=launch.wide, AHEAD=launch.ahead, WRITE=write, EARLY=early,
            **({"launch_pdl": True} if early else {}), **fixed,
        )  # fmt: skip
        if config.use_4over6:
            programs = 1 if _interpreted() else EXTREME_PROGRAMS
            kernel.extreme_kernel[(programs,)](*pointers, numerator, 1.0 / numerator, **fixed)
    return [part.view(w.shape) for part, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]


def raise_if_flagged() -> None:
    """Read and clear the flags of all devices (one synchronisation each); call once per step."""
    for device, flag in _flags.items():
        value = int(flag.item())
        flag.zero_()
        if value & 1:
            raise ValueError(f"a weight given to qdq_nvfp4 on {device} since the last check holds NaN or infinity")
        if value & 2:
            raise ValueError(
                f"a weight given to qdq_nvfp4 on {device} has a maximum above FLT_MAX/448: decode 'te' overflows, use decode='stored'"
            )


__all__ = ["Launch", "amax_nvfp4", "qdq_nvfp4", "raise_if_flagged"]
