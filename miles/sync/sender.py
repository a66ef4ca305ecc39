"""Streams one version through a bucket transport: one fixed bucket (or a pair) per layout, kept across syncs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.sync.bucket import BucketStager, FixedBucket, bucket_size
from miles.sync.plan import SyncPlan
from miles.sync.source import Weights, checked
from miles.sync.transports import BucketTransport
from miles.sync.update import UpdateSession


@dataclass(frozen=True)
class Moved:
    """What a version took: tensors read, bytes written or staged, buckets (or loads) per layout, checksummed or not."""

    tensors: int
    nbytes: int
    buckets: Mapping[str, int]
    checksummed: bool


class BucketSender:
    """Owns the buckets' memory in the transport."""

    def __init__(self, transport: BucketTransport, *, bucket_bytes: int, double_buffer: bool, nvfp4: NVFP4QDQConfig):
        self._nvfp4 = nvfp4
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._count = 2 if double_buffer else 1
        self._buckets: dict[str, FixedBucket] = {}

    @property
    def nbytes(self) -> int:
        """Size of one bucket."""
        return max((bucket.nbytes for bucket in self._buckets.values()), default=0)

    def reserve(self, plan: SyncPlan) -> None:
        """Allocate what this plan needs, before any engine is paused; grows, never shrinks."""
        size = bucket_size(plan, self._bucket_bytes)
        for layout_key in plan.layouts:
            if layout_key not in self._buckets:
                self._buckets[layout_key] = FixedBucket(self._count, self._transport.allocate, self._transport.release)
            self._buckets[layout_key].reserve(size)

    def stream(
        self, weights: Weights, plan: SyncPlan, session: UpdateSession, *, version: int, checksum: bool
    ) -> Moved:
        """Stage and send everything; returns when every bucket is acknowledged or its engine has failed.

        Reads all of `weights` even if no engine is left: the other ranks of the mesh gather along with it.
        """
        stagers = {
            key: BucketStager(
                plan=plan,
                layout_key=key,
                version=version,
                bucket=self._buckets[key],
                checksum=checksum,
                send=partial(session.send, key),
                nvfp4=self._nvfp4,
            )
            for key in plan.layouts
        }
        tensors = 0
        for name, tensor in checked(weights, plan):
            tensors += 1
            if session.working:
                for entry in plan.by_source[name]:
                    stagers[entry.layout_key].add(entry, tensor)
        for stager in stagers.values():
            stager.flush()
        self.drain()
        sent = sum(stager.bytes_sent for stager in stagers.values())
        return Moved(tensors, sent, {key: stager.sequence for key, stager in stagers.items()}, checksum)

    def drain(self) -> None:
        """Wait until no bucket is in flight (bounded by the sends themselves)."""
        for bucket in self._buckets.values():
            bucket.drain()

    def close(self) -> None:
        for bucket in self._buckets.values():
            bucket.close()
        self._buckets = {}
