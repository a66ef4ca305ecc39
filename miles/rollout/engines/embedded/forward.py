"""Forward passes over the paged cache: tokens in, hidden states and logits out, padded to whole row blocks."""

from __future__ import annotations

import numpy as np
import torch

from miles.rollout.engines.embedded.attention import ROW_BLOCK, KVCache
from miles.rollout.engines.embedded.models import Model


class ForwardPass:
    """A model and its cache. `cache` is None while its memory is released."""

    def __init__(self, model: Model, *, pages: int) -> None:
        self.model = model
        self._pages = pages
        self.cache: KVCache | None = self._new_cache()

    @property
    def held_cache(self) -> KVCache:
        assert self.cache is not None, "nothing computes without a cache"
        return self.cache

    @property
    def cache_bytes(self) -> int:
        return 0 if self.cache is None else self.cache.data.untyped_storage().nbytes()

    def drop_cache(self) -> None:
        self.cache = None

    def restore_cache(self) -> None:
        if self.cache is None:
            self.cache = self._new_cache()

    def hidden(self, tokens: np.ndarray, start: np.ndarray, count: np.ndarray, tables: np.ndarray) -> torch.Tensor:
        """tokens int64 [n] of sequences that bring `count` each from position `start` -> [padded n, hidden]."""
        rows = _padded(len(tokens))
        plan = self.held_cache.plan(start, count, tables, rows)
        padded = np.zeros(rows, dtype=np.int64)
        padded[: len(tokens)] = tokens
        ids = torch.from_numpy(padded).to(self.model.device)
        return self.model.hidden_states(ids, plan.positions, plan.attend)

    def logits(self, hidden: torch.Tensor, rows: np.ndarray | None) -> torch.Tensor:
        """float32 [len(rows), V] of these rows of `hidden`; None: of all of them, padding included."""
        if rows is None:
            return self.model.logits(hidden)
        padded = np.zeros(_padded(len(rows)), dtype=np.int64)
        padded[: len(rows)] = rows
        chosen = hidden[torch.from_numpy(padded).to(hidden.device)]
        return self.model.logits(chosen)[: len(rows)]

    def _new_cache(self) -> KVCache:
        m = self.model
        return KVCache(
            layers=m.num_layers, kv_heads=m.num_kv_heads, heads=m.num_heads, head_dim=m.head_dim,
            pages=self._pages, dtype=m.dtype, device=m.device,
        )  # fmt: skip


def _padded(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK
