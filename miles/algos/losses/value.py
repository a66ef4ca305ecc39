"""The critic's loss."""

from __future__ import annotations

import torch

from miles.algos.losses.ratio import masked


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """0.5·max((V-G)^2, (clip(V, V_old-eps, V_old+eps) - G)^2) per token [n]."""
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    clipped = torch.minimum(torch.maximum(values, old_values - eps), old_values + eps)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
