"""The critic's output layer: one number per token instead of vocabulary logits."""

from __future__ import annotations

from typing import Any

import torch


class ValueHead(torch.nn.Module):
    """Stands where GPTModel has its output layer: hidden [s, b, h] -> values [s, b, 1].

    The weight is equal on all tensor-parallel ranks and starts at zero, so that the first advantages are the rewards.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        values = torch.nn.functional.linear(hidden, self.weight)
        if self.sequence_parallel:
            # Every rank computes the same loss from the gathered values, so the gradient is only split again.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
