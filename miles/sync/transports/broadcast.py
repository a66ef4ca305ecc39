"""One contiguous broadcast per bucket from the trainer (rank 0) to all engines of a layout, over gloo.

A group `<run>-<epoch>` per layout, rebuilt when the membership changed or a broadcast failed. A dead member breaks
the collective for the others of its group: they become dirty, and the next sync reaches them over a new group.
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from miles.rollout.engines.embedded.weight_group import WeightGroup, local_address
from miles.sync.engine_link import EngineLink
from miles.sync.errors import EngineSyncError
from miles.sync.membership import LiveEngine, LiveSet
from miles.sync.plan import SyncPlan
from miles.weight_wire.bucket import BucketHeader

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class BroadcastTransport:
    name = "broadcast"

    def __init__(self, live: LiveSet, *, run_id: str, timeout_s: float):
        self._live = live
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._members: dict[str, tuple[tuple[str, str], ...]] = {}
        self._epoch = 0
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-broadcast")

    def connect(self, live: Sequence[LiveEngine], plan: SyncPlan) -> None:
        for layout_key in plan.layouts:
            engines = [engine for engine in live if engine.table.layout_key == layout_key]
            members = tuple((engine.url, engine.epoch) for engine in engines)
            if members and members != self._members.get(layout_key):
                self._build(layout_key, engines)
                self._members[layout_key] = members

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def release(self, buffer: torch.Tensor) -> None:
        """Ordinary memory: dropped with its last reference."""

    def message(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> tuple[str, dict[str, Any]]:
        return "/update_weights_from_distributed", {"group_name": self._groups[layout_key].name}

    def deliver(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> Future[None]:
        return self._sender.submit(self._send, layout_key, buffer[: header.nbytes])

    def close(self) -> None:
        self._sender.shutdown(wait=True)
        self._groups, self._members = {}, {}

    def capabilities(self) -> dict[str, Any]:
        return {"name": self.name, "same_host": False, "groups": [group.name for group in self._groups.values()]}

    def _send(self, layout_key: str, data: torch.Tensor) -> None:
        try:
            self._groups[layout_key].send(data)
        except RuntimeError:
            # The engines notice on their own side and answer with it; a broken group is never used again.
            self._members.pop(layout_key, None)

    def _build(self, layout_key: str, engines: Sequence[LiveEngine]) -> None:
        self._epoch += 1
        name = f"{self._run_id}-{self._epoch}"
        host = urllib.parse.urlsplit(engines[0].url).hostname or ""
        address = "127.0.0.1" if host in LOOPBACK else local_address(host)
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port, size = listener.getsockname()[1], len(engines) + 1
        common = {
            "group_name": name,
            "master_address": address,
            "master_port": port,
            "world_size": size,
            "backend": "gloo",
            "timeout_s": self._timeout_s,
        }

        def init(rank: int) -> Any:
            def call(link: EngineLink) -> None:
                body = {**common, "rank_offset": rank}
                link.post("/init_weights_update_group", body, timeout_s=2 * self._timeout_s)

            return call

        asked = [self._live.handle(e.url).submit(init(rank)) for rank, e in enumerate(engines, start=1)]
        try:
            self._groups[layout_key] = WeightGroup(
                name, address=address, port=port, rank=0, size=size, backend="gloo", timeout_s=self._timeout_s,
                listen_fd=listener.detach(),
            )  # fmt: skip
        except RuntimeError as error:
            refusals = [str(e) for e in (future.exception() for future in asked) if e is not None]
            for engine in engines:
                self._live.drop(engine.url)
            raise EngineSyncError(
                ", ".join(e.url for e in engines), "no_group", "; ".join(refusals) or str(error)[:300]
            ) from error
        for future in asked:
            future.result()
