"""Tells when a client's connection is gone, between two requests too: an update lives no longer than its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable


def watched_protocol(closed: Callable[[Hashable], None]) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, calling `closed` with the address that requests had as their `client`."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class WatchedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def connection_lost(self, exc: Exception | None) -> None:
            client = self.client
            super().connection_lost(exc)
            closed(client)

    return WatchedProtocol
