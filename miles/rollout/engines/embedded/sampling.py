"""Seeded sampling of one token a row, with the log-prob of the drawn token.

Distribution. z = logits / temperature in float32; p = softmax(z) over the full vocabulary. Kept are the tokens with
rank < top_k, probability mass before them < top_p, and p >= min_p * max p (rank by p, ties by lower id); the token
is drawn from p restricted to the kept ones. Temperature 0 is greedy: the token of highest logit, with T = 1 for
log-probs. The reported log-prob is log p over the **full vocabulary** at that temperature, whatever was kept; with
`want_support` the kept ids and their renormalised log-probs come too, and log p_S of the drawn token is among them.

Randomness. One uniform number per token, a hash of (request seed, absolute position): no state, no dependence on
the batch, and a request continued from its own partial output draws the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles.kernels.log_probs.reference import row_log_softmax

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_ROW_BUDGET = 1 << 24  # elements of one float64 table


def _mix(z: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [n], int64 [n] -> float64 [n] in [0, 1), 53 random bits each."""
    with np.errstate(over="ignore"):
        stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
        bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(slots=True)
class SamplingRows:
    """Parameters of n rows; arrays [n]. `top_k` <= 0 means no limit."""

    temperature: np.ndarray  # float32
    top_p: np.ndarray  # float64
    top_k: np.ndarray  # int64
    min_p: np.ndarray  # float64
    seed: np.ndarray  # uint64
    position: np.ndarray  # int64, of the token that is drawn
    want_support: np.ndarray  # bool

    @property
    def cuts(self) -> np.ndarray:
        return (self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0)


@dataclass(slots=True)
class Drawn:
    """`tokens` int64 [n], `log_probs` float32 [n] (non-finite where the logits were), `support` by row index."""

    tokens: np.ndarray
    log_probs: np.ndarray
    support: dict[int, tuple[np.ndarray, np.ndarray]]


def draw(logits: torch.Tensor, rows: SamplingRows) -> Drawn:
    """Sample each row of float32 logits [n, V]. Row i depends on row i alone."""
    n, vocab = logits.shape
    size = max(_ROW_BUDGET // vocab, 1)
    if n <= size:
        return _draw_block(logits, rows, 0, n)
    parts = [_draw_block(logits, rows, i, min(i + size, n)) for i in range(0, n, size)]
    support = {row: value for part in parts for row, value in part.support.items()}
    return Drawn(np.concatenate([p.tokens for p in parts]), np.concatenate([p.log_probs for p in parts]), support)


def _draw_block(logits: torch.Tensor, rows: SamplingRows, start: int, stop: int) -> Drawn:
    at = slice(start, stop)
    temperature = rows.temperature[at]
    greedy = temperature <= 0.0
    scale = np.where(greedy, np.float32(1.0), temperature).astype(np.float32)
    device = logits.device
    log_p = row_log_softmax(logits[at] / torch.from_numpy(scale).to(device)[:, None])
    u = torch.from_numpy(uniform(rows.seed[at], rows.position[at])).to(device)[:, None]
    tokens = _inverse_cdf(log_p.double().exp_(), u)
    cut = np.flatnonzero(rows.cuts[at] & ~greedy)
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    if len(cut):
        index = torch.from_numpy(cut).to(device)
        tokens[index], kept = _draw_cut(log_p[index], u[index], rows, cut, start)
    if greedy.any():
        index = torch.from_numpy(np.flatnonzero(greedy)).to(device)
        tokens[index] = logits[at][index].argmax(-1)
    log_probs = log_p.gather(1, tokens[:, None])[:, 0]
    # NaN anywhere in the row must surface even when the drawn token's value is finite.
    log_probs = torch.where(torch.isfinite(log_p.amax(-1)), log_probs, torch.nan)
    chosen = tokens.cpu().numpy()
    whole = np.flatnonzero(rows.want_support[at] & ~rows.cuts[at] & ~greedy)
    if len(whole):
        everything = np.arange(log_p.shape[1], dtype=np.int32)
        values = log_p[torch.from_numpy(whole).to(device)].cpu().numpy()
        kept |= {start + int(row): (everything, values[i]) for i, row in enumerate(whole)}
    for row in np.flatnonzero(rows.want_support[at] & greedy).tolist():
        kept[start + row] = (chosen[row : row + 1].astype(np.int32), np.zeros(1, dtype=np.float32))
    return Drawn(chosen, log_probs.cpu().numpy(), kept)


def _inverse_cdf(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index whose cumulated probability exceeds u times the total. p float64 [n, V], u [n, 1] -> [n]."""
    cumulated = p.cumsum(-1)
    found = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)[:, 0]
    return found.clamp_(max=p.shape[1] - 1)


def _draw_cut(
    log_p: torch.Tensor, u: torch.Tensor, rows: SamplingRows, cut: np.ndarray, start: int
) -> tuple[torch.Tensor, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Rows that keep a part of the vocabulary: drawn in order of falling probability."""
    ordered, ids = torch.sort(log_p, dim=-1, descending=True, stable=True)
    p = ordered.double().exp_()
    top_p, top_k, min_p = (
        torch.from_numpy(a[start + cut].astype(np.float64)).to(p.device)[:, None]
        for a in (rows.top_p, rows.top_k, rows.min_p)
    )
    before = p.cumsum(-1) - p
    rank = torch.arange(p.shape[1], device=p.device)[None, :]
    keep = ((before < top_p) | (top_p >= 1.0)) & ((rank < top_k) | (top_k <= 0)) & (p >= min_p * p[:, :1])
    keep[:, 0] = True
    inside = p * keep
    tokens = ids.gather(1, _inverse_cdf(inside, u)[:, None])[:, 0]
    wanted = np.flatnonzero(rows.want_support[start + cut])
    if len(wanted) == 0:
        return tokens, {}
    chosen = torch.from_numpy(wanted).to(p.device)
    # A running sum adds a row's terms one by one in its own order: no bit depends on the other rows.
    mass = inside[chosen].cumsum(-1)[:, -1:]
    # Relative to the likeliest token, so that a row of one gets exactly 0.
    log_mass = ordered[chosen, :1].double() + (mass / p[chosen, :1]).log()
    by_id = torch.zeros_like(keep[chosen]).scatter_(1, ids[chosen], keep[chosen])
    support = _rows_of(by_id, log_p[chosen].double() - log_mass)
    return tokens, dict(zip((start + cut[wanted]).tolist(), support, strict=True))


def _rows_of(kept: torch.Tensor, log_probs: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids ascending int32, their log-probs float32) of each row; both arguments [n, V]."""
    ids = kept.nonzero()[:, 1].cpu().numpy().astype(np.int32)
    values = log_probs[kept].float().cpu().numpy()
    ends = kept.sum(-1).cumsum(0).tolist()
    return [(ids[a:b], values[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
