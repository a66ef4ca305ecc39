"""Own attention core for megatron-core's layer spec: causal rows, packed documents, context parallelism, grouped queries.

megatron-core's local core knows neither packed sequences nor context parallelism, so this one replaces it through
the ModuleSpec. Rows (`bshd`) go to one causal call: scaled dot product on a GPU, the embedded engine's arithmetic on
a CPU (docs/decisions/0403). Packed documents (`thd`) are gathered into
rows of similar length, one call per length bucket, so that no token sees another document and no [T, T] mask is
built. Under context parallelism keys and values are all-gathered (their gradients reduce-scattered) and each rank
attends from its own tokens.

Leaves out sliding windows, sinks and unequal query and value head sizes: no family here has them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from miles.kernels.row_attention import KEY_MULTIPLE, MIN_ROWS, attend_rows
from miles.train.megatron.documents import Bucket, DocumentLayout

# Elements of one call's score matrix on the CPU; beyond, torch's form which never holds it whole.
MOST_SCORES = 1 << 24


class OwnAttention(MegatronModule):
    """Core attention with the constructor and forward signature that megatron-core's spec expects.

    query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].
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
        if attention_type != "self" or config.attention_dropout:
            raise ValueError("the own attention core is self-attention without dropout")
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
            # Padding at the right end of a row sees, but is not seen.
            return self._attend(query, key, value, None)
        return self._documents(query, key, value, packed_seq_params)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        """One row per batch element; causal over the first axis unless a mask is given."""
        grouped = query.shape[2] != key.shape[2]
        if query.device.type == "cpu" and query.shape[0] * key.shape[0] * query.shape[1:3].numel() <= MOST_SCORES:
            return self._as_the_engine(query, key, value, allowed)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _as_the_engine(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        """The embedded engine's arithmetic, so that log-probs of trainer and engine agree bit for bit."""
        t, length, group = query.shape[0], key.shape[0], query.shape[2] // key.shape[2]
        # Surplus query rows repeat the last one, surplus keys are masked.
        rows, keys = max(t, -(-MIN_ROWS // group)), -(-length // KEY_MULTIPLE) * KEY_MULTIPLE
        scaled = query.unflatten(2, (-1, group)).permute(2, 1, 0, 3, 4) * self.scale
        if rows > t:
            scaled = torch.cat([scaled, scaled[:, :, -1:].expand(-1, -1, rows - t, -1, -1)], dim=2)
        k, v = (F.pad(tensor.permute(2, 1, 0, 3), (0, 0, 0, keys - length)) for tensor in (key, value))
        if allowed is None:
            masked = torch.ones(t, keys, dtype=torch.bool).triu_(1)[None]
        else:
            masked = F.pad(~allowed[:, 0], (0, keys - length), value=True)
        if rows > t:
            masked = torch.cat([masked, masked[:, -1:].expand(-1, rows - t, -1)], dim=1)
        out = attend_rows(scaled, k, v, masked[:, :, None, :])
        return out[:, :, :t].permute(2, 1, 0, 3, 4).flatten(2)

    def _documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout
    ) -> torch.Tensor:
        if layout.context_group is not None:
            key, value = (
                gather_from_sequence_parallel_region(
                    tensor.contiguous(), tensor_parallel_output_grad=True, group=layout.context_group
                )
                for tensor in (key, value)
            )
        q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        outputs = [self._bucket(q, k, v, bucket) for bucket in layout.buckets]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, layout.restore).unsqueeze(1)

    def _bucket(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """[D * Lq, heads * d] of one bucket's documents."""
        keys = bucket.queries if bucket.keys is None else bucket.keys
        rows = self._attend(_rows(query, bucket.queries), _rows(key, keys), _rows(value, keys), bucket.allowed)
        return rows.transpose(0, 1).flatten(0, 1)


def _rows(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[L, D, heads, d] from [T, heads, d] and index [D, L]."""
    return flat.index_select(0, index.flatten()).view(*index.shape, *flat.shape[1:]).transpose(0, 1)
