"""Digests of a sync: over one tensor, over a bucket, over a plan; and which syncs are checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from miles.weight_wire.bucket import digest
from miles.weight_wire.table import canonical_digest

__all__ = ["ChecksumPolicy", "bucket_digest", "digest", "plan_digest"]


def bucket_digest(buffer: torch.Tensor, nbytes: int) -> int:
    """Digest of the first `nbytes` bytes of a uint8 bucket, alignment gaps (zero) included."""
    return digest(buffer[:nbytes])


def plan_digest(run_id: str, layouts: Iterable[tuple[str, list[Any]]]) -> str:
    """sha256 of the canonical JSON of the run id and every layout's entries, in their sending order."""
    return canonical_digest({"run_id": run_id, "layouts": sorted(layouts)})


class ChecksumPolicy:
    """Decides per sync whether buckets carry a digest (`sync.checksum`)."""

    ALWAYS_FIRST = 2
    PERIOD = 16

    def __init__(self, mode: Literal["full", "sampled", "off"]):
        self._mode = mode
        self._syncs = 0
        self._changed = False

    def membership_changed(self) -> None:
        """The next sync is checked."""
        self._changed = True

    def next_sync(self) -> bool:
        """Whether this sync is checked; call once per sync."""
        index, self._syncs = self._syncs, self._syncs + 1
        changed, self._changed = self._changed, False
        if self._mode != "sampled":
            return self._mode == "full"
        return changed or index < self.ALWAYS_FIRST or index % self.PERIOD == 0
