"""From per-token losses to the scalar of a step."""

from __future__ import annotations

import torch

from miles.algos.losses.ratio import masked


def reduce_loss(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum of values x weights; the weights (`miles.data.batch.Denominators`) carry mask and denominator.

    A weight of 0 removes a token even when its value is not finite.
    """
    return (masked(values, weights != 0) * weights).sum()
