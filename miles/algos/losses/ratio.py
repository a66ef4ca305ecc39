"""Ratios to the old policy, and what a masked token is worth: exactly 0, in value and in gradient."""

from __future__ import annotations

import torch

LOG_RATIO_CLAMP = 20.0


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where active, else exactly 0 (no NaN from the masked side, no gradient to it)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio(log_probs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logp - old in +-20, 0 at masked tokens: replaced before any exp, so that nothing there can be NaN."""
    return masked(log_probs - old, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
