"""Estimators of KL(policy || reference) per token, d = log-prob - reference log-prob (Schulman 2020, k1 to k3).

Masked positions must be replaced by d = 0 by the caller before any of these. Which estimator may be a loss is
decided in `miles.algos.config`; `support_exact` sums over the sampler's support instead of estimating.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Bounds of low_var: on the difference, and on the result.
CLAMP_D, CLAMP_KL = 20.0, 10.0


def k1(d: torch.Tensor) -> torch.Tensor:
    """Unbiased, signed. In a loss its expected gradient is zero."""
    return d


def k2(d: torch.Tensor) -> torch.Tensor:
    """Biased value; its gradient is the reverse KL's, on-policy."""
    return 0.5 * d.square()


def k3(d: torch.Tensor) -> torch.Tensor:
    """expm1(-d) + d: unbiased value, >= 0; its gradient is not the KL's."""
    return torch.expm1(-d) + d


def low_var(d: torch.Tensor) -> torch.Tensor:
    """k3 of d clamped to +-20, result clamped to +-10."""
    return k3(d.clamp(-CLAMP_D, CLAMP_D)).clamp(-CLAMP_KL, CLAMP_KL)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var": low_var}


def estimate(name: str, d: torch.Tensor) -> torch.Tensor:
    if name not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {name!r}; choose one of {', '.join(ESTIMATORS)} (or support_exact)")
    return ESTIMATORS[name](d)


def support_exact(log_policy: torch.Tensor, log_reference: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """sum over v in S_t of pi(v)·(log pi(v) - log ref(v)) -> fp32 [n].

    log_policy, log_reference: fp32 [E], both normalised on the same support S_t; offsets int64 [n+1].
    """
    if log_policy.shape != log_reference.shape:
        raise ValueError(
            f"support_exact: policy scores {list(log_policy.shape)} and reference scores {list(log_reference.shape)} "
            "must be on the same support; score the reference with the rollout's sampling masks"
        )
    terms = log_policy.exp() * (log_policy - log_reference)
    if len(offsets) == 1:
        return terms  # no tokens: empty, in the graph
    return torch.segment_reduce(terms, "sum", offsets=offsets)
