"""Triton kernels for log-probs of given tokens (written for SM90; correct on any Triton target).

All work is in base 2: y = logit·log2(e)/temperature. A tile is [DEPTH, LANES]: each thread holds the same few
lanes at every depth, so that running maxima and sums stay in registers and the loop has no barrier; lanes are
joined once per row. Traffic: `stats` reads the logits once, `gradient` reads once and writes once; `fused`
reads once from memory and once from L2 (the rows in flight must fit there), and writes once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Stands for -inf where a difference of two of them must not be NaN.
_LOWEST = tl.constexpr(-1.0e30)
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
_CLAMP = tl.constexpr(20.0)
PPO_CLIP, DUAL_CLIP, CISPO = 0, 1, 2
_DUAL_CLIP = tl.constexpr(DUAL_CLIP)
_CISPO = tl.constexpr(CISPO)


@triton.jit
def _accumulate(
    base: tl.tensor,
    start: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    s: tl.tensor,
    w: tl.tensor,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
) -> tl.tuple:
    cols = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if KEEP:
        y = tl.load(base + cols, mask=cols < valid, other=-float("inf"), eviction_policy="evict_last")
    else:
        y = tl.load(base + cols, mask=cols < valid, other=-float("inf"))
    y = y.to(tl.float32) * scale
    y = tl.maximum(y, _LOWEST)
    new = tl.maximum(m, tl.max(y, axis=0))
    shrink = tl.exp2(m - new)
    e = tl.exp2(y - new[None, :])
    s = s * shrink + tl.sum(e, axis=0)
    if ENTROPY:
        w = w * shrink + tl.sum(e * y, axis=0)
    return new, s, w


@triton.jit
def stats_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    targets: tl.tensor,
    out_max: tl.tensor,
    out_sum: tl.tensor,
    out_target: tl.tensor,
    out_weighted: tl.tensor,
    stride: tl.tensor,
    offset: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    ENTROPY: tl.constexpr,
    PICKED: tl.constexpr,
) -> None:
    """One program per target: max, sum, target and (ENTROPY) weighted sum, in natural units.

    PICKED: target i belongs to logit row rows[i], else to row i.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + (tl.load(rows + row) if PICKED else row) * stride
    at = tl.load(targets + row) - offset
    here = (at >= 0) & (at < valid)
    picked = tl.load(base + tl.where(here, at, 0), mask=here, other=0.0).to(tl.float32) * scale * _LN2
    m = tl.full([LANES], _LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    for start in range(0, valid, DEPTH * LANES):
        m, s, w = _accumulate(base, start, valid, scale, m, s, w, DEPTH, LANES, ENTROPY, False)
    top = tl.max(m, axis=0)
    shrink = tl.exp2(m - top)
    total = tl.sum(s * shrink, axis=0)
    tl.store(out_max + row, tl.where(valid > 0, top * _LN2, -float("inf")))
    tl.store(out_sum + row, total)
    tl.store(out_target + row, picked)
    if ENTROPY:
        tl.store(out_weighted + row, tl.sum(w * shrink, axis=0) * _LN2)


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    grad: tl.tensor,
    slots: tl.tensor,
    targets: tl.tensor,
    lse: tl.tensor,
    grad_log_probs: tl.tensor,
    entropy: tl.tensor,
    grad_entropy: tl.tensor,
    stride: tl.tensor,
    grad_stride: tl.tensor,
    offset: tl.tensor,
    width: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    inv_temperature: tl.tensor,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
    PICKED: tl.constexpr,
) -> None:
    """One program per (logit row, block of columns); neighbouring programs share a row.

    PICKED: row r belongs to target slots[r]; a row without one (-1) gets zeros and is not read.
    """
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row) if PICKED else row
    used = slot >= 0
    extent = valid if not PICKED else tl.where(used, valid, 0)
    y = tl.load(logits + row * stride + cols, mask=cols < extent, other=-float("inf")).to(tl.float32) * scale
    log2_p = y - tl.load(lse + slot, mask=used, other=0.0) * _LOG2E
    p = tl.exp2(log2_p)
    g = tl.load(grad_log_probs + slot, mask=used, other=0.0) * inv_temperature
    at = tl.load(targets + slot, mask=used, other=-1) - offset
    # A target in padded columns of this shard would be another shard's id.
    out = tl.where((cols == at) & (cols < valid), g, 0.0) - p * g
    if ENTROPY:
        h = tl.load(entropy + slot, mask=used, other=0.0)
        gh = tl.load(grad_entropy + slot, mask=used, other=0.0) * inv_temperature
        out -= gh * p * (tl.maximum(log2_p, _LOWEST) * _LN2 + h)
    tl.store(grad + row * grad_stride + cols, out.to(grad.dtype.element_ty), mask=cols < width)


@triton.jit
def _slope(
    log_prob: tl.tensor,
    old: tl.tensor,
    advantage: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    dual_c: tl.tensor,
    LOSS: tl.constexpr,
) -> tl.tuple:
    """(loss, dloss/dlogp) of one token; the same subgradients as torch at the clip bounds."""
    d = log_prob - old
    ratio = tl.exp2(tl.minimum(tl.maximum(d, -_CLAMP), _CLAMP) * _LOG2E)
    clipped = tl.minimum(tl.maximum(ratio, low), high)
    if LOSS == _CISPO:
        return -clipped * advantage * log_prob, -clipped * advantage
    plain = -ratio * advantage
    bounded = -clipped * advantage
    loss = tl.maximum(plain, bounded)
    moves = (plain >= bounded) & (d >= -_CLAMP) & (d <= _CLAMP)
    if LOSS == _DUAL_CLIP:
        ceiling = -dual_c * advantage
        over = (advantage < 0) & (loss > ceiling)
        loss = tl.where(over, ceiling, loss)
        moves = moves & (over == 0)
    return loss, tl.where(moves, plain, 0.0)


@triton.jit
def fused_kernel(
    logits: tl.tensor,
    grad: tl.tensor,
    slots: tl.tensor,
    targets: tl.tensor,
    old: tl.tensor,
    advantages: tl.tensor,
    weights: tl.tensor,
    out_loss: tl.tensor,
    out_log_prob: tl.tensor,
    out_entropy: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    grad_stride: tl.tensor,
    width: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    inv_temperature: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    dual_c: tl.tensor,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    LOSS: tl.constexpr,
    ON_POLICY: tl.constexpr,
    ENTROPY: tl.constexpr,
    PICKED: tl.constexpr,
) -> None:
    """Persistent: program p takes logit rows p, p + programs, ... `grad` may be `logits` itself."""
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        base = logits + row * stride
        slot = tl.load(slots + row) if PICKED else row
        used = slot >= 0
        # Scalars first: their latency hides behind the pass over the row.
        at = tl.load(targets + slot, mask=used, other=0)
        # An id outside the vocabulary is reported by the caller, after this launch: never read there.
        picked = tl.load(base + at, mask=(at >= 0) & (at < valid), other=0.0).to(tl.float32)
        weight = tl.load(weights + slot, mask=used, other=0.0)
        advantage = tl.load(advantages + slot, mask=used, other=0.0)
        before = tl.load(old + slot, mask=used, other=0.0)
        # A row without a target is not read: its gradient is written as zeros below.
        extent = valid if not PICKED else tl.where(used, valid, 0)
        m = tl.full([LANES], _LOWEST, tl.float32)
        s = tl.zeros([LANES], tl.float32)
        w = tl.zeros([LANES], tl.float32)
        for start in range(0, extent, DEPTH * LANES):
            m, s, w = _accumulate(base, start, extent, scale, m, s, w, DEPTH, LANES, ENTROPY, True)
        top = tl.max(m, axis=0)
        shrink = tl.exp2(m - top)
        # The sum is at least 1 (the largest term); the bound only serves rows that were not read.
        total = tl.maximum(tl.sum(s * shrink, axis=0), 1.0)
        lse2 = top + tl.log2(total)
        log_prob = (picked * scale - lse2) * _LN2
        if ON_POLICY:
            before = log_prob
        loss, slope = _slope(log_prob, before, advantage, low, high, dual_c, LOSS)
        active = weight != 0
        tl.store(out_loss + slot, tl.where(active, loss * weight, 0.0), mask=used)
        tl.store(out_log_prob + slot, log_prob, mask=used)
        if ENTROPY:
            tl.store(out_entropy + slot, (lse2 - tl.sum(w * shrink, axis=0) / total) * _LN2, mask=used)
        g = tl.where(active, slope * weight, 0.0) * inv_temperature
        # -g·p_j = sign·2^(y_j - shift): the slope's size goes into the exponent; a slope of 0 gives 2^-inf.
        sign = tl.where(g > 0, -1.0, 1.0)
        shift = tl.where(g == 0, float("inf"), lse2 - tl.log2(tl.where(g == 0, 1.0, tl.abs(g))))
        out_base = grad + row * grad_stride
        tiles = tl.cdiv(width, DEPTH * LANES)
        # Backwards: what was read last is still in L2. In place is safe: each thread overwrites what it read.
        for i in range(0, tiles):
            start = (tiles - 1 - i) * (DEPTH * LANES)
            cols = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
            y = tl.load(base + cols, mask=cols < extent, other=-float("inf"), eviction_policy="evict_first")
            out = tl.exp2(y.to(tl.float32) * scale - shift) * sign
            if (at >= start) & (at < start + DEPTH * LANES):
                out += tl.where(cols == at, g, 0.0)
            tl.store(out_base + cols, out.to(grad.dtype.element_ty), mask=cols < width, eviction_policy="evict_first")
        row += tl.num_programs(0)


@triton.jit
def scale_kernel(values: tl.tensor, factor: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """values *= factor, without touching memory when the factor (on the device) is 1. Persistent."""
    scale = tl.load(factor)
    if scale != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < count:
            at = start + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < count)
            tl.store(values + at, (x.to(tl.float32) * scale).to(values.dtype.element_ty), mask=at < count)
            start += tl.num_programs(0).to(tl.int64) * BLOCK
