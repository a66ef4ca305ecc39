"""One weight sync over a frozen set of engines: the messages, their order, and what becomes of each engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from miles.sync.config import SyncConfig
from miles.sync.engine_link import EngineLink
from miles.sync.errors import EngineSyncError
from miles.sync.membership import LiveEngine, LiveSet
from miles.sync.plan import SyncPlan
from miles.sync.transports import BucketTransport
from miles.sync.updaters import EngineUpdater, Update
from miles.weight_wire.bucket import BucketHeader


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
        updater: EngineUpdater,
        buckets: BucketTransport | None = None,
    ):
        self.engines = {engine.url: engine for engine in engines}
        self.failures: dict[str, EngineSyncError] = {}
        self._live = live
        self._update = Update(plan, version, config)
        self._updater = updater
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
        """Pause every engine and open its session."""

        def one(engine: LiveEngine, link: EngineLink) -> None:
            self._tokens[engine.url] = self._updater.begin(link, engine, self._update)

        self._each(one)

    def send(self, layout_key: str, header: BucketHeader, buffer: torch.Tensor) -> list[Future[None]]:
        """Hand one bucket to every working engine of its layout. Returns without waiting."""
        transport = self._buckets
        message = transport.message(layout_key, header, buffer)

        def one(engine: LiveEngine) -> Callable[[EngineLink], None]:
            def call(link: EngineLink) -> None:
                if engine.url in self.failures:
                    return
                try:
                    self._updater.bucket(link, engine, self._update, self._tokens[engine.url], header, message)
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
            token = self._tokens[engine.url]
            self._updater.folder(link, engine, self._update, token, nbytes, (route, fields))

        self._each(one)

    def end(self, buckets: Mapping[str, int]) -> None:
        """Close every working engine's session and read back what it serves."""

        def one(engine: LiveEngine, link: EngineLink) -> None:
            count = buckets[engine.table.layout_key]
            self._updater.end(link, engine, self._update, self._tokens[engine.url], count)

        self._each(one)

    def abort(self, reason: str) -> None:
        """Leave no engine in doubt: none that began serves until a whole update."""

        def one(engine: LiveEngine, link: EngineLink) -> None:
            if engine.url in self._tokens:
                self._updater.abort(link, self._update, self._tokens[engine.url], reason)

        self._each(one)

    def _each(self, call: Callable[[LiveEngine, EngineLink], None]) -> None:
        futures = {engine.url: self._live.handle(engine.url).submit(partial(call, engine)) for engine in self.working}
        for url, future in futures.items():
            try:
                future.result()
            except EngineSyncError as error:
                self.failures[url] = error
