"""One persistent HTTP connection to one engine's weight-update routes, with every wait bounded.

Synchronous on purpose: it runs on the trainer's rank 0 beside collectives, and three small requests per sync leave
nothing to gain from an event loop.
"""

from __future__ import annotations

import http.client
import select
import socket
import urllib.parse
from typing import Any

import orjson

from miles.rollout import access
from miles.sync.errors import EngineSyncError


class EngineLink:
    """Calls to one engine. Not thread-safe: the caller keeps one thread per engine."""

    def __init__(self, url: str, *, token: str | None = None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise EngineSyncError(url, "bad_url", "an engine URL looks like http://host:port")
        self.url = url.rstrip("/")
        self._access = access.headers(token)
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80)

    def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        return self._call("POST", path, orjson.dumps(body), timeout_s)

    def close(self) -> None:
        self._connection.close()

    def plain(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
        """A route of a foreign server: its JSON, or None where it answers other text. `EngineSyncError` for no answer,
        another status than 200 (code `http_<status>`), or `success: false`."""
        status, raw = self._exchange(method, path, None if body is None else orjson.dumps(body), timeout_s)
        try:
            reply = orjson.loads(raw)
        except orjson.JSONDecodeError:
            reply = None
        if status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
            said = reply.get("message") if isinstance(reply, dict) else None
            said = said or raw[:300].decode(errors="replace")
            raise EngineSyncError(self.url, f"http_{status}", f"{method} {path}: {said}")
        return reply

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        """The reply's object. `EngineSyncError` for no answer, another status than 200, or success other than true."""
        status, raw = self._exchange(method, path, body, timeout_s)
        try:
            reply = orjson.loads(raw)
        except orjson.JSONDecodeError:
            reply = None
        if not isinstance(reply, dict):
            raise EngineSyncError(self.url, f"http_{status}", f"{method} {path}: {raw[:200]!r}")
        if status != 200 or reply.get("success") is not True:
            raise EngineSyncError(
                self.url,
                str(reply.get("code", f"http_{status}")),
                str(reply.get("message", raw[:200])),
                retry_after_s=reply.get("retry_after_s"),
            )
        return reply

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and body; `EngineSyncError` for no answer in time."""
        connection = self._connection
        try:
            if connection.sock is not None and select.select([connection.sock], [], [], 0)[0]:
                connection.close()  # the engine closed the idle connection; nothing was sent on it yet
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            headers = {**self._access, **({"Content-Type": "application/json"} if body else {})}
            connection.request(method, path, body, headers)
            # A server with Nagle's algorithm on sends the body of a reply after our acknowledgement of its head,
            # which the kernel would otherwise hold back for 40 ms.
            if connection.sock is not None and hasattr(socket, "TCP_QUICKACK"):
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = f"{type(error).__name__} {error}".strip()
            raise EngineSyncError(
                self.url, "unreachable", f"{method} {path} within {timeout_s:.3g} s: {reason}"
            ) from error
