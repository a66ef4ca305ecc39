"""Own attention core for megatron-core's layer spec: causal rows and packed documents, grouped queries.

megatron-core's local core knows no packed sequences, so this one replaces it through the ModuleSpec. Rows
(`bshd`) go to one causal scaled-dot-product call. Packed documents (`thd`) are gathered into rows of equal
length, one call per length bucket, so that no token ever sees another document and no [T, T] mask is built.

Leaves out sliding windows, sinks and context parallelism; `DocumentLayout` refuses what it cannot describe.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from miles.train.megatron.documents import DocumentLayout


class OwnAttention(MegatronModule):
    """Core attention with the constructor and forward signature that megatron-core's spec expects.

    query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]; softmax in fp32 or the input dtype
    as torch's kernels do it.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or config.context_parallel_size > 1 or config.attention_dropout:
            raise ValueError("the own attention core is self-attention without dropout and context parallelism")
        self.scale = softmax_scale if softmax_scale is not None else (k_channels or config.kv_channels) ** -0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: DocumentLayout | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return self._causal(query, key, value)
        return self._documents(query, key, value, packed_seq_params)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal over the first axis, one row per batch element. Padding at the right end sees, but is not seen."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = query.shape[2] != key.shape[2]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout
    ) -> torch.Tensor:
        flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]
        outputs = []
        for index in layout.rows:
            rows, width = index.shape
            gathered = [
                tensor.index_select(0, index.flatten()).view(rows, width, *tensor.shape[1:]).transpose(0, 1)
                for tensor in flat
            ]
            outputs.append(self._causal(*gathered).transpose(0, 1).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, layout.restore).unsqueeze(1)
