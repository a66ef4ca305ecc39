"""What weight updates need of the engine behind them: its parameters, its pauses, its caches and its computing thread."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from miles.rollout.engines.embedded.weight_state import BeginUpdate, UpdateSession, WeightState

# Pauses have owners, and only the owner ends one.
UPDATE_PAUSE = "weight update"


class WeightHost(Protocol):
    """All calls are thread-safe and bounded.

    Between `begin_update` and `finish_update` (or a failure in `state`) no forward pass runs, so the tensors of
    `parameters()` may be written in place from any thread.
    """

    state: WeightState

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Hugging Face name -> live storage (views of fused storage are contiguous)."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """Name -> the parameter whose storage it shares (tied embeddings)."""
        ...

    def pause(self, mode: str, owner: str) -> Future[None]:
        """Done once no request computes (retract | abort | in_place); requests that arrive now wait. Idempotent."""
        ...

    def resume(self, owner: str) -> Future[None]:
        """Give up this owner's pause; the engine goes on when nobody holds one."""
        ...

    def begin_update(self, begin: BeginUpdate, now: float, client: Hashable) -> UpdateSession:
        """`state.begin` between two forward passes."""
        ...

    def finish_update(self, token: str) -> None:
        """Drop every cached prefix, then `state.finish`."""
        ...

    def refuse_all(self) -> None:
        """Refuse what runs and waits with what `state` says now."""
        ...

    def release_memory(self, tags: Sequence[str]) -> Future[bool]:
        """Free `kv_cache` or `weights`; False while requests run. `IllegalTransition` when the state forbids it."""
        ...

    def resume_memory(self, tags: Sequence[str]) -> Future[None]: ...

    def flush_caches(self) -> None:
        """Drop every cached prefix; allowed while updating."""
        ...

    def cached_prefix_tokens(self) -> int:
        """Tokens in the prefix cache; 0 right after a flush or an update."""
        ...
