"""What a policy loss is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from miles.algos.losses.ratio import log_ratio, masked
from miles.algos.sequences import Sequences

if TYPE_CHECKING:
    from miles.algos.config import AlgoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The n response tokens of one micro-batch (or of this context-parallel rank's slice), fp32 [n] unless said.

    `log_probs` carry the gradient. Anything may stand at masked tokens of `log_probs` and `old`; `advantages` are 0
    there. `ref_log_probs` are there when the loss declares a reference.
    """

    log_probs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor  # bool [n]
    sequences: Sequences
    config: AlgoConfig
    ref_log_probs: torch.Tensor | None = None

    @property
    def low(self) -> float:
        """Lower bound of the clipped ratio, 1 - eps_clip."""
        return 1.0 - self.config.eps_clip

    @property
    def high(self) -> float:
        """Upper bound of the clipped ratio, 1 + eps_clip_high."""
        return 1.0 + self.config.clip_high

    def log_ratio(self) -> torch.Tensor:
        """log_probs - old in +-20, 0 at masked tokens, with gradient."""
        return log_ratio(self.log_probs, self.old, self.mask)

    def active(self, values: torch.Tensor) -> torch.Tensor:
        """`values` at trained tokens, exactly 0 elsewhere, in value and gradient."""
        return masked(values, self.mask)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` [n] with gradient; `ratio`, `clipped_low`, `clipped_high` [n] detached, for metrics."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
