"""What one weight sync did, for logs, metrics and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """`engines`: url -> "serving" or the failure's text. Times in seconds, sizes in bytes.

    `nbytes` counts staged bytes over all layouts, alignment included. `seconds` has the phases plan, begin, stream,
    end; their sum is below `total_s`.
    """

    version: int
    run_id: str
    plan_digest: str
    transport: str
    tensors: int
    buckets: int
    nbytes: int
    bucket_bytes: int
    checksummed: bool
    total_s: float
    seconds: Mapping[str, float]
    engines: Mapping[str, str]

    @property
    def failed(self) -> tuple[str, ...]:
        """URLs of engines that left the live set."""
        return tuple(url for url, state in self.engines.items() if state != "serving")

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.total_s / 1e9 if self.total_s > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Names for `metrics.jsonl`."""
        return {
            "sync/seconds": self.total_s,
            "sync/bytes": float(self.nbytes),
            "sync/buckets": float(self.buckets),
            "sync/gb_per_s": self.gb_per_s,
            "sync/engines": float(len(self.engines) - len(self.failed)),
            "sync/engines_failed": float(len(self.failed)),
            **{f"sync/{phase}_s": value for phase, value in self.seconds.items()},
        }
