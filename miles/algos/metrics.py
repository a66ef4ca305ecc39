"""Metric sums that add over micro-batches and ranks, and the named numbers they end as.

One vector of sums, one of maxima and a histogram: a step needs two small collectives whatever it reports.
Metrics use the loss mask before any rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from miles.algos.collectives import all_reduce, group_size
from miles.algos.kl import k3, low_var
from miles.algos.losses import LOG_RATIO_CLAMP, masked

if TYPE_CHECKING:
    import torch.distributed as dist

    from miles.algos.corrections import ImportanceWeights
    from miles.algos.losses import PolicyLoss
    from miles.algos.sequences import Sequences
    from miles.data.tensors import BatchTensors

# name of the sum -> (metric, name of the sum it is divided by)
_RATIOS = {
    "entropy": ("train/entropy", "entropy_tokens"),
    "clip_low": ("train/clip_frac_low", "tokens"),
    "clip_high": ("train/clip_frac_high", "tokens"),
    "ratio": ("train/ratio_mean", "tokens"),
    "approx_kl": ("train/approx_kl", "tokens"),
    "ppo_kl": ("train/ppo_kl", "tokens"),
    "ess": ("train/ess", "sequences"),
    "kl": ("train/kl", "kl_tokens"),
    "teacher": ("train/teacher_kl", "teacher_tokens"),
    "abs_diff": ("mismatch/abs_diff_mean", "mismatch_tokens"),
    "k3": ("mismatch/k3", "mismatch_tokens"),
    "w": ("mismatch/w_mean", "mismatch_tokens"),
    "rejected": ("mismatch/rejected_frac", "correction_tokens"),
    "mass": ("mismatch/support_mass_mean", "mass_tokens"),
}
_LOSSES = {
    "loss": "train/loss",
    "pg_loss": "train/pg_loss",
    "kl_loss": "train/kl_loss",
    "value_loss": "train/value_loss",
}
_COUNTS = (
    "tokens",
    "entropy_tokens",
    "sequences",
    "kl_tokens",
    "teacher_tokens",
    "mismatch_tokens",
    "correction_tokens",
    "mass_tokens",
)
_NAMES = (*_RATIOS, *_COUNTS, "nonfinite_tokens", *_LOSSES, *(f"has_{name}" for name in _LOSSES))
_INDEX = {name: i for i, name in enumerate(_NAMES)}
_BINS = 4001  # log-weights from -20 to 20, 0.01 apart


@dataclass(slots=True)
class MetricSums:
    """`sums` float64 [K], `maxima` float64 [2] (absolute difference, -support mass), `histogram` float64 of log w."""

    sums: torch.Tensor
    maxima: torch.Tensor
    histogram: torch.Tensor

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> MetricSums:
        return cls(
            torch.zeros(len(_NAMES), dtype=torch.float64, device=device),
            torch.full((2,), -torch.inf, dtype=torch.float64, device=device),
            torch.zeros(_BINS, dtype=torch.float64, device=device),
        )

    @classmethod
    def of_losses(cls, losses: dict[str, torch.Tensor | None]) -> MetricSums:
        given = {name: value.detach() for name, value in losses.items() if value is not None}
        out = cls.zeros(next(iter(given.values())).device)
        for name, value in given.items():
            out.sums[_INDEX[name]] = value
            out.sums[_INDEX[f"has_{name}"]] = 1.0
        return out

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums(
            self.sums + other.sums, torch.maximum(self.maxima, other.maxima), self.histogram + other.histogram
        )

    def all_reduce(self, group: dist.ProcessGroup | None) -> MetricSums:
        """Totals over the data x context-parallel group; every rank must call."""
        if group_size(group) == 1:
            return self
        import torch.distributed as dist

        additive = all_reduce(torch.cat([self.sums, self.histogram]), group=group, name="metric sums")
        maxima = all_reduce(self.maxima.clone(), group=group, name="metric maxima", op=dist.ReduceOp.MAX)
        return MetricSums(additive[: len(_NAMES)], maxima, additive[len(_NAMES) :])

    @property
    def nonfinite_tokens(self) -> int:
        """Above 0 (with `nonfinite: skip_step`): the backend takes no optimizer step."""
        return int(self.sums[_INDEX["nonfinite_tokens"]])

    def finish(self) -> dict[str, float]:
        """The metrics of the step; only those that were measured."""
        value = dict(zip(_NAMES, self.sums.tolist(), strict=True))
        out = {metric: value[name] for name, metric in _LOSSES.items() if value[f"has_{name}"] > 0}
        for name, (metric, count) in _RATIOS.items():
            if value[count] > 0:
                out[metric] = value[name] / value[count]
        largest, lightest = self.maxima.tolist()
        if value["mismatch_tokens"] > 0:
            out["mismatch/abs_diff_max"] = largest
            out["mismatch/w_p99"] = _percentile(self.histogram, 0.99)
        if value["mass_tokens"] > 0:
            out["mismatch/support_mass_min"] = -lightest
        if value["nonfinite_tokens"] > 0:
            out["train/nonfinite_tokens"] = value["nonfinite_tokens"]
        return out


def _percentile(histogram: torch.Tensor, share: float) -> float:
    """Weight at the share of the distribution, to within one bin (1 %)."""
    cumulative = histogram.cumsum(0)
    at = int(torch.searchsorted(cumulative, share * cumulative[-1]))
    log_weight = -LOG_RATIO_CLAMP + at * (2 * LOG_RATIO_CLAMP / (_BINS - 1))
    return float(torch.exp(torch.tensor(log_weight, dtype=torch.float64)))


@torch.no_grad()
def objective_metrics(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    batch: BatchTensors,
    sequences: Sequences,
    *,
    policy: PolicyLoss,
    correction: ImportanceWeights | None,
    entropy: torch.Tensor | None,
    kl: torch.Tensor | None,
    support_mass: torch.Tensor | None,
    losses: dict[str, torch.Tensor | None],
    nonfinite: torch.Tensor,
) -> MetricSums:
    """Sums of one micro-batch. Token columns are stacked and reduced in one product with the mask."""
    out = MetricSums.of_losses(losses)
    out.sums[_INDEX["nonfinite_tokens"]] = nonfinite
    moved = masked(log_probs - old, mask)
    columns = {
        "tokens": torch.ones_like(log_probs),
        "clip_low": policy.clipped_low.to(log_probs.dtype),
        "clip_high": policy.clipped_high.to(log_probs.dtype),
        "ratio": policy.ratio,
        "approx_kl": low_var(moved),
        "ppo_kl": -moved,
    }
    for name, value in (("entropy", entropy), ("kl", kl), ("mass", support_mass)):
        if value is not None:
            columns[name] = value.detach()
            columns[f"{name}_tokens"] = columns["tokens"]
    if batch.teacher_log_probs is not None:
        columns |= {"teacher": masked(old - batch.teacher_log_probs, mask), "teacher_tokens": columns["tokens"]}
    weights = policy.ratio
    if batch.rollout_log_probs is not None:
        difference = masked(old - batch.rollout_log_probs, mask)
        log_w = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        raw = log_w.exp() if correction is None else correction.raw
        weights = weights * log_w.exp()
        columns |= {"abs_diff": difference.abs(), "k3": k3(log_w), "w": raw, "mismatch_tokens": columns["tokens"]}
        out.maxima[0] = difference.abs().max() if difference.numel() else -torch.inf
        bins = ((raw.log() + LOG_RATIO_CLAMP) * ((_BINS - 1) / (2 * LOG_RATIO_CLAMP))).round().long()
        out.histogram = torch.bincount(bins.clamp(0, _BINS - 1), weights=mask.double(), minlength=_BINS)
        if correction is not None:
            columns |= {"rejected": correction.rejected.to(log_probs.dtype), "correction_tokens": columns["tokens"]}
    if support_mass is not None and bool(mask.any()):
        out.maxima[1] = -support_mass[mask].min()
    names = list(columns)
    stacked = torch.stack([masked(columns[name], mask) for name in names]).double()
    out.sums[[_INDEX[name] for name in names]] = stacked.sum(dim=1)
    _effective_sample_size(out, masked(weights, mask), mask, sequences)
    return out


def _effective_sample_size(out: MetricSums, weights: torch.Tensor, mask: torch.Tensor, sequences: Sequences) -> None:
    """(sum w)^2 / (n·sum w^2) per sequence; w is the full weight from the sampling policy to the current one."""
    parallel = group_size(sequences.cp_group)  # each context-parallel rank sees the whole sum: share it out
    total = sequences.total(weights, "ess weights")
    squares = sequences.total(weights.square(), "ess squared weights")
    n = sequences.active(mask)
    ess = total.square() / (n * squares.clamp(min=1e-8)).clamp(min=1e-8)
    out.sums[_INDEX["ess"]] = masked(ess, n > 0).sum() / parallel
    out.sums[_INDEX["sequences"]] = (n > 0).sum() / parallel
