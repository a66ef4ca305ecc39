"""One persistent launch for the tensor maxima and the QDQ: CUDA only, one slot per weight.

All programs are resident (cooperative launch). Weight w's maximum is gathered while weight w-1 is quantised, so that
the second read of a weight of up to about the L2 size finds much of it in L2, and the wait for the other programs
is hidden behind SLACK tiles of the next maximum. The interpreter runs programs one after another and would wait for
ever; there, and for shared slots, the two launches of `kernel.py` give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from miles.kernels.nvfp4_qdq.kernel import _abs_max, _entry, _load_row, _raise_flag, _scales, _tile


@triton.jit
def _amax_steps(words, best, tiles, blocks, first, last, ROWS: tl.constexpr, FP16: tl.constexpr):
    """Fold this program's tiles number first..last-1 into `best`."""
    programs = tl.num_programs(0)
    for j in range(first, last):
        tile = tl.program_id(0) + j * programs
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        best = tl.maximum(best, _abs_max(_load_row(words, row, row < blocks, ROWS), FP16))
    return best


@triton.jit
def fused_kernel(
    base, table, out, amax_bits, arrived, flag, n, numerator, recip,
    ROWS: tl.constexpr, SLACK: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr,
):  # fmt: skip
    """`amax_bits`, `arrived`: int32 [n], zero at start. 4over6 in the exact domain divides in full (no fast form)."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    previous_steps = 0
    for w in range(n + 1):
        steps = 0
        blocks = previous_steps.to(tl.int64)
        words = base
        best = tl.zeros((ROWS,), tl.int32)
        if w < n:
            src, _out, blocks, _slot, _first = _entry(table, n, w)
            words = base + src * 4
            steps = (tl.cdiv(tl.cdiv(blocks, ROWS), programs)).to(tl.int32)
            best = _amax_steps(words, best, 0, blocks, 0, tl.minimum(SLACK, steps), ROWS, FP16)
        if w > 0:
            seen = tl.atomic_add(arrived + w - 1, 0, sem="acquire")
            while seen < programs:
                seen = tl.atomic_add(arrived + w - 1, 0, sem="acquire")
            amax = tl.atomic_max(amax_bits + w - 1, 0, sem="relaxed").to(tl.float32, bitcast=True)
            s_enc, s_dec = _scales(amax, numerator)
            src, dst, previous_blocks, _slot, _first = _entry(table, n, w - 1)
            worst = tl.zeros((ROWS,), tl.int32)
            for j in range(previous_steps):
                tile = pid + (previous_steps - 1 - j) * programs
                row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
                bits = _tile(
                    base + src * 4, out + dst * 4, row, row < previous_blocks, amax, s_enc, s_dec, numerator, recip,
                    ROWS, FP16, PTX, FOUR_OVER_SIX, False, FP16_DOMAIN, MSE, TE_DECODE,
                )  # fmt: skip
                worst = tl.maximum(worst, bits)
            _raise_flag(flag, tl.max(worst, axis=0), amax, TE_DECODE)
        if w < n:
            best = _amax_steps(words, best, 0, blocks, tl.minimum(SLACK, steps), steps, ROWS, FP16)
            tl.atomic_max(amax_bits + w, tl.max(best, axis=0), sem="relaxed")
            tl.atomic_add(arrived + w, 1, sem="release")
        previous_steps = steps
