"""Configuration of weight sync (`sync.*` of a recipe)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import StrictModel


class DeltaConfig(StrictModel):
    """Sparse updates on disk (`transport: disk_delta`)."""

    # A full checkpoint is written after this many deltas in a row.
    max_chain: int = Field(8, ge=1)


class SyncConfig(StrictModel):
    """How trained weights reach the engines."""

    # auto: same host -> tensor (shared memory, CUDA IPC), else broadcast (NCCL, gloo).
    transport: Literal["auto", "tensor", "broadcast", "rdt", "disk", "disk_delta"] = "auto"
    # Grows to the largest parameter or atomic group when that is larger.
    bucket_bytes: int = Field(536870912, ge=4096)
    # Stage the next bucket while the engines read this one.
    double_buffer: bool = True
    # sampled: the first two syncs, the one after a membership change, then every 16th.
    checksum: Literal["full", "sampled", "off"] = "full"
    # What running requests meet: re-queue (retract), return partial output (abort), freeze (in_place).
    pause: Literal["retract", "abort", "in_place"] = "retract"
    # Every wait is bounded by this plus the bytes at min_gb_per_s.
    timeout_s: float = Field(60.0, gt=0)
    min_gb_per_s: float = Field(5.0, gt=0)
    # Where disk and disk_delta write; None: a folder of the run.
    directory: str | None = None
    delta: DeltaConfig = DeltaConfig()
