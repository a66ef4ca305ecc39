"""Which engines take part in a sync: admitted by their table, frozen for the sync's length, dropped when they fail.

An engine that failed leaves the live set and is asked again before the next sync, so a restarted one comes
back by a whole update at the next version, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from miles.sync.engine_link import EngineLink
from miles.sync.errors import EngineSyncError, NoEngineLeft
from miles.weight_wire.bucket import SCHEMA
from miles.weight_wire.table import EngineTable

if TYPE_CHECKING:
    from miles.sync.entry import SourceSpec
    from miles.sync.updaters import EngineUpdater

T = TypeVar("T")


@dataclass(frozen=True)
class LiveEngine:
    """One admitted engine: what it said about itself when it was admitted."""

    url: str
    epoch: str
    host: str
    transports: tuple[str, ...]
    table: EngineTable


class EngineHandle:
    """One engine's connection and the single thread that talks to it, so its messages stay in order."""

    def __init__(self, url: str, *, token: str | None = None):
        self.url = url
        self._link = EngineLink(url, token=token)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync")

    def submit(self, call: Callable[[EngineLink], T]) -> Future[T]:
        return self._thread.submit(call, self._link)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._link.close()


def read_engine(link: EngineLink, *, timeout_s: float) -> LiveEngine:
    """GET /parameter_table. `EngineSyncError` if the engine is away or answers in another schema."""
    reply = link.get("/parameter_table", timeout_s=timeout_s)
    if reply.get("schema") != SCHEMA:
        raise EngineSyncError(link.url, "schema", f"parameter table schema {reply.get('schema')!r}, expected {SCHEMA}")
    tables = reply["tables"]
    if len(tables) != 1:
        raise EngineSyncError(link.url, "ranks", f"{len(tables)} rank tables behind one URL; give each rank's URL")
    return LiveEngine(
        url=link.url,
        epoch=reply["engine_epoch"],
        host=reply["host"],
        transports=tuple(reply["transports"]),
        table=EngineTable.from_wire(tables[0]),
    )


class LiveSet:
    """The engines a pusher may reach, and which of them are live now."""

    def __init__(self, urls: Iterable[str], updater: EngineUpdater, *, token: str | None = None):
        self._updater = updater
        self._token = token
        self._handles: dict[str, EngineHandle] = {}
        self._live: dict[str, LiveEngine] = {}
        self.changes = 0
        self.set_engines(urls)

    def handle(self, url: str) -> EngineHandle:
        return self._handles[url]

    def set_engines(self, urls: Iterable[str]) -> None:
        """Replace the addresses; engines that stay keep their connection and their place."""
        wanted = list(dict.fromkeys(url.rstrip("/") for url in urls))
        for url in [url for url in self._handles if url not in wanted]:
            self._handles.pop(url).close()
            self.drop(url)
        for url in wanted:
            if url not in self._handles:
                self._handles[url] = EngineHandle(url, token=self._token)

    def drop(self, url: str) -> None:
        """The engine failed or is gone: it must be read again before it takes part."""
        if self._live.pop(url, None) is not None:
            self.changes += 1

    def freeze(
        self, offered: Mapping[str, SourceSpec], *, timeout_s: float
    ) -> tuple[tuple[LiveEngine, ...], dict[str, str]]:
        """The engines of the coming sync, and url -> reason for those that could not be read.

        Reads only engines that are not live yet. `NoEngineLeft` when none answers.
        """
        asked = {
            url: handle.submit(lambda link: self._updater.read(link, offered, timeout_s=timeout_s))
            for url, handle in self._handles.items()
            if url not in self._live
        }
        away: dict[str, str] = {}
        for url, future in asked.items():
            try:
                self._live[url] = future.result()
                self.changes += 1
            except EngineSyncError as error:
                away[url] = str(error)
        live = tuple(self._live[url] for url in self._handles if url in self._live)
        if not live:
            raise NoEngineLeft(
                "no engine can take part in the weight sync: " + ("; ".join(away.values()) or "no URL given")
            )
        return live, away

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles, self._live = {}, {}


def status_of(reply: dict[str, Any]) -> dict[str, Any]:
    """The engine's own statement about its weights inside a reply."""
    weights = reply.get("weights")
    return weights if isinstance(weights, dict) else {}
