"""One persistent launch for the tensor maxima and the QDQ: CUDA only, one slot per weight.

All programs are resident (cooperative launch). Weight w's maximum is gathered while weight w-1 is quantised, so that
the second read of a weight of up to about the L2 size finds much of it in L2, and the wait for the other programs
is hidden behind SLACK tiles of the next maximum. The interpreter runs programs one after another and would wait for
ever; there, and for shared slots, the two launches of `kernel.py` give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from miles.kernels.nvfp4_qdq.kernel import _abs_max, _entry, _load, _quantize_store, _raise_flag, _scales, _words


@triton.jit
def _row(step, ROWS: tl.constexpr):
    """Rows of this program's tile number `step`."""
    tile = tl.program_id(0) + step * tl.num_programs(0)
    return tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def _amax_steps(words, best, blocks, first, last, ROWS: tl.constexpr, FP16: tl.constexpr, KEEP: tl.constexpr):
    """Fold this program's tiles first..last-1 into `best`, one tile read ahead."""
    x0, x1 = _load(words, _row(first, ROWS), tl.where(first < last, blocks, 0), KEEP, ROWS)
    for j in range(first, last):
        n0, n1 = _load(words, _row(j + 1, ROWS), tl.where(j + 1 < last, blocks, 0), KEEP, ROWS)
        best = tl.maximum(best, _abs_max(_words(x0, x1, ROWS), FP16))
        x0 = n0
        x1 = n1
    return best


@triton.jit
def fused_kernel(
    base, table, out, amax_bits, arrived, flag, n, numerator, recip,
    ROWS: tl.constexpr, SLACK: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    FP16_DOMAIN: tl.constexpr, MSE: tl.constexpr, TE_DECODE: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """`amax_bits`, `arrived`: int32 [n], zero at start. 4over6 in the exact domain divides in full (no fast form)."""
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
            best = _amax_steps(words, best, blocks, 0, tl.minimum(SLACK, steps), ROWS, FP16, KEEP)
        if w > 0:
            src, dst, previous_blocks, _slot, _first = _entry(table, n, w - 1)
            source = base + src * 4
            x0, x1 = _load(source, _row(previous_steps - 1, ROWS), previous_blocks, DROP, ROWS)
            seen = tl.atomic_add(arrived + w - 1, 0, sem="acquire")
            while seen < programs:
                seen = tl.atomic_add(arrived + w - 1, 0, sem="acquire")
            amax = tl.atomic_max(amax_bits + w - 1, 0, sem="relaxed").to(tl.float32, bitcast=True)
            s_enc, s_dec = _scales(amax, numerator)
            worst = tl.zeros((ROWS,), tl.int32)
            for j in range(previous_steps):
                step = previous_steps - 1 - j
                n0, n1 = _load(source, _row(step - 1, ROWS), tl.where(step > 0, previous_blocks, 0), DROP, ROWS)
                bits = _quantize_store(
                    _words(x0, x1, ROWS), out + dst * 4, _row(step, ROWS), previous_blocks, amax, s_enc, s_dec,
                    numerator, recip, ROWS, FP16, PTX, FOUR_OVER_SIX, False, FP16_DOMAIN, MSE, TE_DECODE, DROP,
                )  # fmt: skip
                worst = tl.maximum(worst, bits)
                x0 = n0
                x1 = n1
            _raise_flag(flag, tl.max(worst, axis=0), amax, TE_DECODE)
        if w < n:
            best = _amax_steps(words, best, blocks, tl.minimum(SLACK, steps), steps, ROWS, FP16, KEEP)
            tl.atomic_max(amax_bits + w, tl.max(best, axis=0), sem="relaxed")
            tl.atomic_add(arrived + w, 1, sem="release")
        previous_steps = steps
