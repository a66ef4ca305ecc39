"""Root-mean-square norm for megatron-core's layer spec; unlike its torch norm it works under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis. Marks its weight so that the gradients of the
    sequence shards are summed."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(f"only plain RMSNorm is built, the model asks for {config.normalization}")
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.shape, self.weight, self.eps)
