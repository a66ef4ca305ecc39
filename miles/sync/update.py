"""One weight sync over a frozen set of engines: the messages, their order, and what becomes of each engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from miles.sync.config import SyncConfig
from miles.sync.engine_link import EngineLink
from miles.sync.errors import EngineSyncError
from miles.sync.membership import LiveEngine, LiveSet, status_of
from miles.sync.plan import SyncPlan
from miles.sync.transports import BucketTransport
from miles.weight_wire.bucket import SCHEMA, BucketHeader


class UpdateSession:
    """One update of frozen engines to one version: begin -> buckets -> end, then dropped.

    Per engine: updating(v') -> serving(v') or failed; a failed engine gets no further message.
    """

    def __init__(
        self,
        engines: Sequence[LiveEngine],
        live: LiveSet,
        plan: SyncPlan,
        *,
        version: int,
        config: SyncConfig,
        buckets: BucketTransport | None = None,
    ):
        self.engines = {engine.url: engine for engine in engines}
        self.failures: dict[str, EngineSyncError] = {}
        self._live = live
        self._plan = plan
        self._version = version
        self._config = config
        self._bucket_transport = buckets
        self._tokens: dict[str, str] = {}

    @property
    def _buckets(self) -> BucketTransport:
        assert self._bucket_transport is not None, "this update loads a folder, it sends no buckets"
        return self._bucket_transport

    @property
    def working(self) -> list[LiveEngine]:
        """Engines without a failure so far."""
        return [engine for url, engine in self.engines.items() if url not in self.failures]

    def begin(self) -> None:
        """Pause every engine and open its session. A busy engine is asked again until its old session must be over."""
        self._each(self._begin_one)

    def send(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> list[Future[None]]:
        """Hand one bucket to every working engine of its layout. Returns without waiting."""
        transport = self._buckets
        route, fields = transport.message(layout_key, header, buffer)
        common = {**fields, "bucket": header.to_wire(), "flush_cache": False}
        timeout_s = self._bounded(header.nbytes)

        def one(engine: LiveEngine) -> Callable[[EngineLink], None]:
            def call(link: EngineLink) -> None:
                if engine.url in self.failures:
                    return
                try:
                    reply = link.post(route, {**self._fields(engine), **common}, timeout_s=timeout_s)
                    _check_ack(link.url, header, reply)
                except EngineSyncError as error:
                    self.failures[engine.url] = error

            return call

        receivers = [engine for engine in self.working if engine.table.layout_key == layout_key]
        if not receivers:
            return []
        acks = [self._live.handle(engine.url).submit(one(engine)) for engine in receivers]
        delivery = transport.deliver(layout_key, header, buffer)
        return acks if delivery is None else [*acks, delivery]

    def load_folder(self, route: str, fields: Mapping[str, Any], nbytes: int) -> None:
        """Have every working engine load what was written; it counts as one bucket."""

        def one(engine: LiveEngine, link: EngineLink) -> None:
            body = {**self._fields(engine), **fields, "flush_cache": False}
            link.post(route, body, timeout_s=self._bounded(nbytes))

        self._each(one)

    def end(self, buckets: Mapping[str, int]) -> None:
        """Close every working engine's session and read back what it serves."""

        def one(engine: LiveEngine, link: EngineLink) -> None:
            body = {**self._fields(engine), "buckets": buckets[engine.table.layout_key]}
            status = status_of(link.post("/end_weight_update", body, timeout_s=self._bounded(0)))
            expected = {
                "state": "serving",
                "run_id": self._plan.run_id,
                "weight_version": str(self._version),
                "plan_digest": self._plan.digest,
                "engine_epoch": engine.epoch,
            }
            found = {key: status.get(key) for key in expected}
            if found != expected:
                raise EngineSyncError(link.url, "read_back", f"reports {found} after the update, expected {expected}")

        self._each(one)

    def abort(self, reason: str) -> None:
        """Leave no engine in doubt: each that began becomes dirty now instead of at its timeout."""

        def one(engine: LiveEngine, link: EngineLink) -> None:
            if engine.url in self._tokens:
                body = {"session": self._tokens[engine.url], "reason": reason[:500]}
                link.post("/abort_weight_update", body, timeout_s=self._bounded(0))

        self._each(one)

    def _begin_one(self, engine: LiveEngine, link: EngineLink) -> None:
        body = {
            "schema": SCHEMA,
            "run_id": self._plan.run_id,
            "weight_version": str(self._version),
            "selector": self._plan.selectors[engine.table.layout_key],
            "plan_digest": self._plan.digest,
            "table_digest": engine.table.table_digest,
            "engine_epoch": engine.epoch,
            "pause": self._config.pause,
            # Longer than we ever wait for another engine: its failure must not cost this one its session.
            "timeout_s": 2 * self._bounded(self._config.bucket_bytes),
        }
        deadline = time.monotonic() + 3 * self._bounded(self._config.bucket_bytes)
        while True:
            try:
                self._tokens[engine.url] = link.post("/begin_weight_update", body, timeout_s=self._bounded(0))[
                    "session"
                ]
                return
            except EngineSyncError as error:
                wait_s = min(error.retry_after_s or 0.0, 1.0) + 0.02
                if error.code != "busy" or time.monotonic() + wait_s > deadline:
                    raise
                time.sleep(wait_s)

    def _each(self, call: Callable[[LiveEngine, EngineLink], None]) -> None:
        futures = {engine.url: self._live.handle(engine.url).submit(partial(call, engine)) for engine in self.working}
        for url, future in futures.items():
            try:
                future.result()
            except EngineSyncError as error:
                self.failures[url] = error

    def _fields(self, engine: LiveEngine) -> dict[str, Any]:
        return {
            "session": self._tokens[engine.url],
            "plan_digest": self._plan.digest,
            "selector": self._plan.selectors[engine.table.layout_key],
            "weight_version": str(self._version),
        }

    def _bounded(self, nbytes: int) -> float:
        return self._config.timeout_s + nbytes / (self._config.min_gb_per_s * 1e9)


def _check_ack(url: str, header: BucketHeader, reply: Mapping[str, Any]) -> None:
    expected = None if header.digest is None else f"{header.digest:#x}"
    if (reply.get("sequence"), reply.get("digest")) != (header.sequence, expected):
        raise EngineSyncError(
            url, "bad_ack", f"bucket {header.sequence} digest {expected}: acknowledged as {reply.get('sequence')}, "
            f"{reply.get('digest')}"
        )  # fmt: skip
