"""Tiles of blocks of 16 between memory and registers: one lane owns one block, eight 32-bit words.

So the 4over6 error is a true left-to-right sum in registers. Offsets are 64-bit up to a tile, 32-bit inside it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split4(tile: tl.tensor, ROWS: tl.constexpr) -> tl.tuple:
    """[ROWS, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def join4(c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (ROWS, 4))


@triton.jit
def _rows_left(start: tl.tensor, blocks: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """64-bit offsets end here: inside a tile everything is 32-bit."""
    return tl.minimum(blocks - start, ROWS).to(tl.int32)


@triton.jit
def load_tile(
    base: tl.tensor, start: tl.tensor, blocks: tl.tensor, ROWS: tl.constexpr, POLICY: tl.constexpr
) -> tl.tuple:
    """The words of blocks start..start+ROWS-1 as two tiles [ROWS, 4], one vector load each; from `blocks` on, zero."""
    row = tl.arange(0, ROWS)
    offset = row[:, None] * 8 + tl.arange(0, 4)[None, :]
    mask = (row < _rows_left(start, blocks, ROWS))[:, None]
    base += start * 8
    first = tl.load(base + offset, mask=mask, other=0, eviction_policy=POLICY)
    return first, tl.load(base + offset + 4, mask=mask, other=0, eviction_policy=POLICY)


@triton.jit
def store_tile(
    base: tl.tensor,
    start: tl.tensor,
    blocks: tl.tensor,
    y: tl.tensor,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    POLICY: tl.constexpr,
) -> None:
    """Eight words of each block. WIDE exchanges halves between lanes first, so that each store fills whole sectors."""
    row = tl.arange(0, ROWS)
    mask = (row < _rows_left(start, blocks, ROWS))[:, None]
    base += start * 8
    first = join4(y[0], y[1], y[2], y[3], ROWS)
    second = join4(y[4], y[5], y[6], y[7], ROWS)
    if WIDE:
        whole = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 8))
        tl.store(base + row[:, None] * 8 + tl.arange(0, 8)[None, :], whole, mask=mask, eviction_policy=POLICY)
    else:
        offset = row[:, None] * 8 + tl.arange(0, 4)[None, :]
        tl.store(base + offset, first, mask=mask, eviction_policy=POLICY)
        tl.store(base + offset + 4, second, mask=mask, eviction_policy=POLICY)


@triton.jit
def words_of(first: tl.tensor, second: tl.tensor, ROWS: tl.constexpr) -> tl.tuple:
    """Two tiles -> the eight words of each block."""
    w0, w1, w2, w3 = _split4(first, ROWS)
    w4, w5, w6, w7 = _split4(second, ROWS)
    return w0, w1, w2, w3, w4, w5, w6, w7
