"""Hand-over of bucket memory inside one host: POSIX shared memory (memfd) for CPU engines.

Nothing with a name is ever created, so a killed trainer or engine leaves nothing behind. The engine maps the buffer
once per session and unmaps it before it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from miles.sync.membership import LiveEngine
from miles.sync.plan import SyncPlan
from miles.weight_wire.bucket import BucketHeader
from miles.weight_wire.shared_buffer import SharedBuffer


class TensorTransport:
    """Buckets are shared buffers of this process; a message carries their handle."""

    name = "tensor"

    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}

    def connect(self, live: Sequence[LiveEngine], plan: SyncPlan) -> None:
        """Nothing to set up: every message carries what an engine needs to attach."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        shared = SharedBuffer(nbytes)
        self._buffers[shared.tensor.data_ptr()] = shared
        return shared.tensor

    def release(self, buffer: torch.Tensor) -> None:
        self._buffers.pop(buffer.data_ptr()).close()

    def message(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> tuple[str, dict[str, Any]]:
        handle = self._buffers[buffer.data_ptr()].handle
        return "/update_weights_from_tensor", {"load_format": "miles_bucket", "handle": handle}

    def deliver(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> None:
        """The engines read the memory themselves."""

    def close(self) -> None:
        for shared in self._buffers.values():
            shared.close()
        self._buffers = {}

    def capabilities(self) -> dict[str, Any]:
        """`open_handles`: buffers this process holds for engines to attach to."""
        return {"name": self.name, "same_host": True, "open_handles": len(self._buffers)}
