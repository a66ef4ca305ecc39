"""The collective group a trainer and its engines broadcast weight buckets over (gloo; CPU).

Independent of any default process group, so a trainer that already has one can join. Rank 0 is the trainer. The
rendezvous port is bound by the trainer and handed over open (`listen_fd`): nobody can take it in between.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from miles.weight_wire.bucket import WeightWireError

BACKENDS = ("gloo",)


def local_address(peer: str, port: int = 1) -> str:
    """The address of this host that a route to `peer` would use; sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))
        return probe.getsockname()[0]


class WeightGroup:
    """One group, joined on construction. Every wait is bounded by `timeout_s` (`RuntimeError` past it)."""

    def __init__(
        self,
        name: str,
        *,
        address: str,
        port: int,
        rank: int,
        size: int,
        backend: str,
        timeout_s: float,
        listen_fd: int | None = None,
    ):
        if backend not in BACKENDS:
            raise WeightWireError(f"weight group backend {backend!r}: this engine offers {', '.join(BACKENDS)}")
        self.name = name
        self._limit = timedelta(seconds=timeout_s)
        listening: dict[str, Any] = {} if listen_fd is None else {"master_listen_fd": listen_fd}
        store = TCPStore(address, port, size, rank == 0, timeout=self._limit, wait_for_workers=False, **listening)
        gloo: Any = ProcessGroupGloo  # torch states neither its options nor its collectives
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=local_address(address))]
        options._timeout = self._limit
        self._store = store
        self._group: Any = gloo(PrefixStore(name, store), rank, size, options)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def send(self, buffer: torch.Tensor) -> None:
        """Rank 0: one contiguous broadcast of the bucket."""
        self._broadcast(buffer)

    def receive(self, nbytes: int) -> torch.Tensor:
        """Other ranks: the bucket, in memory that the next `receive` overwrites."""
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        view = self._scratch[:nbytes]
        self._broadcast(view)
        return view

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._limit
        self._group.broadcast([tensor], options).wait()
