"""Which weight version the embedded engine may serve: the one place that the receiver, scheduler and HTTP agree on.

States: serving(v) -> updating(v') -> serving(v') | dirty. Only `WeightReceiver` moves it; the scheduler runs no
forward pass unless the state is `serving`, so the receiver may write parameters in place in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

State = Literal["serving", "updating", "dirty"]


@dataclass(frozen=True, slots=True)
class GateState:
    """A consistent view. `version` is the last version that was completed, never one that was only begun."""

    state: State
    version: int
    reason: str = ""

    @property
    def refusal(self) -> tuple[str, str] | None:
        """(kind, text) of the 503 that a request gets now, or None when requests are served."""
        if self.state == "serving":
            return None
        if self.state == "updating":
            return "weights_updating", f"a weight update is in progress; last complete version {self.version}"
        return "weights_dirty", f"{self.reason}; complete a whole weight sync first"


class ServingGate:
    """Thread-safe holder of the state. `listener` is called after every change, outside the lock."""

    def __init__(self, version: int) -> None:
        self._state = GateState("serving", version)
        self._lock = threading.Lock()
        self.listener: Callable[[], None] = lambda: None

    def get(self) -> GateState:
        return self._state

    def set(self, state: State, *, version: int | None = None, reason: str = "") -> None:
        with self._lock:
            self._state = GateState(state, self._state.version if version is None else version, reason)
        self.listener()


class WeightHost(Protocol):
    """What the engine offers to its weight receiver. All calls are thread-safe and bounded.

    `begin_update` returns once no forward pass runs; until `finish_update` or `fail_update` none will, so the
    tensors of `parameters()` may be written in place from any thread.
    """

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Hugging Face name -> live storage (views of fused storage are contiguous)."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """Name -> the parameter whose storage it shares (tied embeddings)."""
        ...

    @property
    def weight_version(self) -> int: ...

    @property
    def gate_state(self) -> GateState: ...

    def begin_update(self) -> None:
        """serving | dirty -> updating."""
        ...

    def finish_update(self, version: int) -> None:
        """updating -> serving(version): drops every cached prefix first."""
        ...

    def fail_update(self, reason: str) -> None:
        """any -> dirty: running and waiting requests are refused with 503 `weights_dirty`."""
        ...

    def flush_caches(self) -> None:
        """Drop every cached prefix."""
        ...

    def cached_prefix_tokens(self) -> int:
        """Tokens in the prefix cache; 0 right after a flush or an update."""
        ...
