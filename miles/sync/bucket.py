"""Fixed-size buckets: how pieces are laid out in bytes, and when a full bucket is handed to the transport.

One code for CPU and GPU memory. A bucket is rewritten only after every receiver of its last content
acknowledged it; with two buckets the next round is staged meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.sync.checksum import bucket_digest
from miles.sync.entry import PlanEntry
from miles.sync.formats import encode_group
from miles.sync.plan import SyncPlan
from miles.weight_wire.bucket import DTYPES, BucketHeader, Piece, align_up

__all__ = ["BucketStager", "FixedBucket", "align_up", "bucket_size", "staged_bytes"]

logger = logging.getLogger(__name__)

# (nbytes, itemsize) of one piece.
Size = tuple[int, int]


def place(start: int, sizes: Sequence[Size]) -> tuple[list[int], int]:
    """Aligned offsets of pieces laid out from byte `start`, and the end byte."""
    offsets, end = [], start
    for nbytes, itemsize in sizes:
        offset = align_up(end, itemsize)
        offsets.append(offset)
        end = offset + nbytes
    return offsets, end


def staged_bytes(sizes: Sequence[Size]) -> int:
    """Bytes that a group takes in an empty bucket, alignment included."""
    return place(0, sizes)[1]


def bucket_size(plan: SyncPlan, bucket_bytes: int) -> int:
    """max(configured, largest destination parameter, largest atomic group), but no more than the whole plan needs."""
    largest = total = 0
    for entries in plan.layouts.values():
        groups: dict[str, list[Size]] = {}
        for entry in entries:
            groups.setdefault(entry.atomic_group, []).append(_size(entry))
        largest = max(largest, *(staged_bytes(sizes) for sizes in groups.values()))
        total = max(total, staged_bytes([size for sizes in groups.values() for size in sizes]))
    if largest > bucket_bytes:
        logger.warning(
            "weight bucket grows from %d to %d bytes: the largest atomic group needs it", bucket_bytes, largest
        )
    return max(largest, min(bucket_bytes, total), 1)


class FixedBucket:
    """`count` equal buffers in transport memory, allocated once per size and reused for every sync.

    `allocate(nbytes)` gives the uint8 buffer; `release(buffer)` takes it back when the bucket must grow.
    """

    def __init__(
        self,
        count: int,
        allocate: Callable[[int], torch.Tensor],
        release: Callable[[torch.Tensor], None],
    ):
        self.nbytes = 0
        self.allocations = 0
        self._count = count
        self._allocate = allocate
        self._release = release
        self._buffers: list[torch.Tensor] = []
        self._acks: list[list[Future[None]]] = []
        self._next = 0

    def reserve(self, nbytes: int) -> None:
        """Make every buffer at least this large; keeps the old ones when they are."""
        if nbytes > self.nbytes:
            self.close()
            self._buffers = [self._allocate(nbytes) for _ in range(self._count)]
            self._acks = [[] for _ in range(self._count)]
            self.nbytes = nbytes
            self.allocations += 1

    def take(self) -> tuple[int, torch.Tensor]:
        """The next buffer, once every receiver acknowledged its last content. Waits are bounded by the sends'."""
        index, self._next = self._next, (self._next + 1) % self._count
        wait(self._acks[index])
        self._acks[index] = []
        return index, self._buffers[index]

    def sent(self, index: int, acks: Sequence[Future[None]]) -> None:
        """Buffer `index` is in flight until all `acks` are done."""
        self._acks[index] = list(acks)

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        wait([ack for acks in self._acks for ack in acks])

    def close(self) -> None:
        self.drain()
        for buffer in self._buffers:
            self._release(buffer)
        self._buffers, self._acks, self.nbytes, self._next = [], [], 0, 0


@dataclass(slots=True)
class BucketStager:
    """Packs the pieces of one layout as they arrive and sends each bucket when the next group does not fit.

    `send(header, buffer)` returns one future per receiver. A group waits until all its pieces are there.
    """

    plan: SyncPlan
    layout_key: str
    version: int
    bucket: FixedBucket
    checksum: bool
    send: Callable[[BucketHeader, torch.Tensor], Sequence[Future[None]]]
    nvfp4: NVFP4QDQConfig = field(default_factory=NVFP4QDQConfig)
    sequence: int = 0
    bytes_sent: int = 0
    _waiting: dict[str, list[tuple[PlanEntry, torch.Tensor]]] = field(default_factory=dict)
    _pieces: list[Piece] = field(default_factory=list)
    _current: tuple[int, torch.Tensor] | None = None
    _end: int = 0

    def add(self, entry: PlanEntry, tensor: torch.Tensor) -> None:
        """Offer one piece of a destination: the whole source, in the source's dtype."""
        group = self._waiting.setdefault(entry.atomic_group, [])
        group.append((entry, tensor))
        if len(group) == self.plan.group_sizes[self.layout_key, entry.atomic_group]:
            self._stage(self._waiting.pop(entry.atomic_group))

    def waiting(self) -> list[str]:
        """Destinations some of whose pieces have not come."""
        return sorted(self._waiting)

    def flush(self) -> None:
        """Send what is staged."""
        if self._current is None:
            return
        index, buffer = self._current
        header = BucketHeader(
            version=self.version,
            sequence=self.sequence,
            nbytes=self._end,
            pieces=tuple(self._pieces),
            digest=bucket_digest(buffer, self._end) if self.checksum else None,
        )
        self.bucket.sent(index, self.send(header, buffer))
        self.sequence += 1
        self.bytes_sent += self._end
        self._current, self._pieces, self._end = None, [], 0

    def _stage(self, group: list[tuple[PlanEntry, torch.Tensor]]) -> None:
        # In the plan's order, which `bucket_size` counted the bytes of: alignment depends on it.
        if len(group) > 1:
            group.sort(key=lambda item: self.plan.positions[item[0]])
        sizes = [_size(entry) for entry, _ in group]
        offsets, end = place(self._end, sizes)
        if end > self.bucket.nbytes:
            self.flush()
            offsets, end = place(0, sizes)
        if self._current is None:
            self._current = self.bucket.take()
        buffer = self._current[1]
        for (entry, tensor), offset in zip(encode_group(group, self.nvfp4), offsets, strict=True):
            if offset > self._end:
                buffer[self._end : offset] = 0
            self._end = offset + entry.nbytes
            target = buffer[offset : self._end].view(DTYPES[entry.dtype]).view(entry.shape)
            target.copy_(tensor)
            self._pieces.append(
                Piece(entry.dest, entry.dtype, entry.shape, offset, entry.nbytes, entry.scale, entry.slot)
            )


def _size(entry: PlanEntry) -> Size:
    return entry.nbytes, DTYPES[entry.dtype].itemsize
