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
def _accumulate(base, start, valid, scale, m, s, w, DEPTH: tl.constexpr, LANES: tl.constexpr, ENTROPY: tl.constexpr):
    cols = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    y = tl.load(base + cols, mask=cols < valid, other=-float("inf")).to(tl.float32) * scale
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
    logits,
    columns,
    out_max,
    out_sum,
    out_target,
    out_weighted,
    stride,
    valid,
    scale,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program per row: max, sum, target and (ENTROPY) weighted sum, in natural units."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    m = tl.full([LANES], _LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    for start in range(0, valid, DEPTH * LANES):
        m, s, w = _accumulate(base, start, valid, scale, m, s, w, DEPTH, LANES, ENTROPY)
    top = tl.max(m, axis=0)
    shrink = tl.exp2(m - top)
    total = tl.sum(s * shrink, axis=0)
    at = tl.load(columns + row)
    picked = tl.load(base + tl.maximum(at, 0), mask=at >= 0, other=0.0).to(tl.float32) * scale * _LN2
    tl.store(out_max + row, tl.where(valid > 0, top * _LN2, -float("inf")))
    tl.store(out_sum + row, total)
    tl.store(out_target + row, picked)
    if ENTROPY:
        tl.store(out_weighted + row, tl.sum(w * shrink, axis=0) * _LN2)


@triton.jit
def gradient_kernel(
    logits,
    grad,
    columns,
    lse,
    grad_log_probs,
    entropy,
    grad_entropy,
    stride,
    grad_stride,
    width,
    valid,
    scale,
    inv_temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program per (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(logits + row * stride + cols, mask=cols < valid, other=-float("inf")).to(tl.float32) * scale
    log2_p = y - tl.load(lse + row) * _LOG2E
    p = tl.exp2(log2_p)
    g = tl.load(grad_log_probs + row) * inv_temperature
    at = tl.load(columns + row)
    out = tl.where(cols == at, g, 0.0) - p * g
    if ENTROPY:
        h = tl.load(entropy + row)
        gh = tl.load(grad_entropy + row) * inv_temperature
        out -= gh * p * (tl.maximum(log2_p, _LOWEST) * _LN2 + h)
    tl.store(grad + row * grad_stride + cols, out.to(grad.dtype.element_ty), mask=cols < width)


@triton.jit
def _slope(log_prob, old, advantage, low, high, dual_c, LOSS: tl.constexpr):
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
    logits,
    grad,
    columns,
    old,
    advantages,
    weights,
    out_loss,
    out_log_prob,
    rows,
    stride,
    grad_stride,
    width,
    valid,
    scale,
    inv_temperature,
    low,
    high,
    dual_c,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    LOSS: tl.constexpr,
    ON_POLICY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent: program p takes rows p, p + programs, ... `grad` may be `logits` itself."""
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        base = logits + row * stride
        m = tl.full([LANES], _LOWEST, tl.float32)
        s = tl.zeros([LANES], tl.float32)
        w = tl.zeros([LANES], tl.float32)
        for start in tl.range(0, valid, DEPTH * LANES, num_stages=STAGES):
            m, s, w = _accumulate(base, start, valid, scale, m, s, w, DEPTH, LANES, False)
        top = tl.max(m, axis=0)
        lse2 = top + tl.log2(tl.sum(s * tl.exp2(m - top), axis=0))
        at = tl.load(columns + row)
        log_prob = (tl.load(base + at).to(tl.float32) * scale - lse2) * _LN2
        weight = tl.load(weights + row)
        active = weight != 0
        if ON_POLICY:
            before = log_prob
        else:
            before = tl.load(old + row)
        loss, slope = _slope(log_prob, before, tl.load(advantages + row), low, high, dual_c, LOSS)
        tl.store(out_loss + row, tl.where(active, loss * weight, 0.0))
        tl.store(out_log_prob + row, log_prob)
        g = tl.where(active, slope * weight, 0.0) * inv_temperature
        # Everyone has read the target's logit before the gradient may overwrite it in place.
        tl.debug_barrier()
        out_base = grad + row * grad_stride
        tiles = tl.cdiv(width, DEPTH * LANES)
        # Backwards: what was read last is still in L2.
        for i in tl.range(0, tiles, num_stages=STAGES):
            start = (tiles - 1 - i) * (DEPTH * LANES)
            cols = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
            y = tl.load(base + cols, mask=cols < valid, other=-float("inf"), eviction_policy="evict_first")
            p = tl.exp2(y.to(tl.float32) * scale - lse2)
            out = tl.where(cols == at, g, 0.0) - p * g
            tl.store(out_base + cols, out.to(grad.dtype.element_ty), mask=cols < width, eviction_policy="evict_first")
        row += tl.num_programs(0)
