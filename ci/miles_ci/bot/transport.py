"""One HTTP exchange with the standard library: no redirects, no retries, bounded body, timeouts.

`Transport.send` is the seam; the client's behaviour is tested against a real local server through it.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_BODY = 64 * 1024 * 1024


class TransportError(Exception):
    """The exchange did not complete; the request may or may not have been carried out."""


@dataclass(frozen=True)
class Reply:
    """Status, headers with lower-case names, body. `truncated`: the body was longer than the limit."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool = False


@dataclass(frozen=True)
class Transport:
    timeout_s: float = 30.0

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, *, limit: int = MAX_BODY
    ) -> Reply:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TransportError(f"not an HTTP address: {parts.scheme}://{parts.hostname}")
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request(method, target, body=body, headers=dict(headers))
            response = connection.getresponse()
            content = response.read(limit + 1)
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, content[:limit], len(content) > limit)
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"{method} {parts.hostname}{parts.path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
