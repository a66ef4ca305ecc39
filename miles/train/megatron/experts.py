"""Experts that get fewer than four tokens, on the CPU.

The CPU's matrix kernels sum a row in another order when there are fewer than 4 rows (`miles.kernels.row_attention`),
so an expert's result for a token would depend on how many others were routed to it, and differ from the engine's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from miles.kernels.row_attention import MIN_ROWS


def pad_small_experts(model: torch.nn.Module) -> None:
    """Give every local expert of `model` at least MIN_ROWS rows, or none; the surplus is zero and cut off again."""
    for module in model.modules():
        for expert in getattr(module, "local_experts", ()):
            expert.forward = _Padded(expert.forward)


class _Padded:
    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens [n, hidden], scale [n]."""
        count = len(tokens)
        surplus = MIN_ROWS - count if 0 < count < MIN_ROWS else 0
        if not surplus:
            return self._forward(tokens, scale)
        output, bias = self._forward(F.pad(tokens, (0, 0, 0, surplus)), F.pad(scale, (0, surplus)))
        return output[:count], bias
