"""Rotary embedding of the model: frequencies from the checkpoint's `RopeSpec`, positions from the batch.

Replaces megatron-core's module because that one derives positions from the sequence length alone, which is
wrong for packed documents, and knows fewer formulas.
"""

from __future__ import annotations

from typing import Any

import torch

from miles.models.errors import ModelError
from miles.models.rope import RopeSpec
from miles.train.megatron.documents import DocumentLayout


class Rotary(torch.nn.Module):
    """Called by GPTModel with what `get_rotary_seq_len` returned: angles [T, 1, 1, dim]."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", spec.inv_freq().to(device), persistent=False)
        self._rows: dict[int, torch.Tensor] = {}

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: torch.Tensor,
        transformer_config: Any,
        packed_seq_params: DocumentLayout | None = None,
    ) -> int | DocumentLayout:
        """The document layout itself, or the number of positions of a row."""
        if packed_seq_params is not None:
            return packed_seq_params
        source = transformer.input_tensor if transformer.input_tensor is not None else transformer_input
        length = source.shape[0]
        if transformer_config.sequence_parallel:
            length *= transformer_config.tensor_model_parallel_size
        return length

    def forward(self, where: int | DocumentLayout, *, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        if isinstance(where, int):
            if where not in self._rows:
                self._rows[where] = self._angles(torch.arange(where, device=self.inv_freq.device))
            return self._rows[where]
        return self._angles(where.positions)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        half = torch.outer(positions.to(torch.float32), self.inv_freq)
        full = (
            torch.stack((half, half), dim=-1).flatten(1) if self.spec.interleaved else torch.cat((half, half), dim=-1)
        )
        return full[:, None, None, :]


def set_cos_sin_scale(config: Any, spec: RopeSpec) -> None:
    """megatron-core multiplies cos and sin by a factor it computes from these attributes, if they exist."""
    scale = spec.cos_sin_scale()
    if scale == 1.0:
        return
    import math

    config.yarn_rotary_scaling_factor = spec.factor
    # m(x) = 0.1 x ln(factor) + 1 and the second term m(0) = 1: solve for the wanted scale.
    config.yarn_mscale = (scale - 1.0) / (0.1 * math.log(spec.factor))
    config.yarn_mscale_all_dim = 0.0


def check_inv_freq(model: Any, spec: RopeSpec) -> None:
    """The built model's real frequencies must be those of the checkpoint."""
    built = model.rotary_pos_emb.inv_freq.cpu()
    golden = spec.inv_freq()
    if built.shape != golden.shape or not torch.allclose(built, golden, rtol=1e-6, atol=0):
        raise ModelError(
            f"the built model's rotary frequencies {built[:4].tolist()} differ from the checkpoint's {golden[:4].tolist()}"
        )
