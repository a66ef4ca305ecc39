"""The run's token: who has it may drive the run's engines and routers, nobody else on the host.

Made by the driver, it travels to its own processes through Ray and from there to an engine through a pipe, or in a
file that only its owner can read; in HTTP as a header. It is never in a command line, an environment or a log.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from miles.config import ConfigError

HEADER = "authorization"
SCHEME = "Bearer "
# Says that a process lives and nothing else.
OPEN_PATHS = frozenset({"/health"})
MIN_LENGTH, MAX_LENGTH = 32, 256

App = Callable[[Any, Any, Any], Awaitable[None]]
REFUSAL = b'{"success":false,"code":"unauthorized","message":"this route wants the run\'s token","error":'
REFUSAL += b'{"type":"unauthorized","message":"this route wants the run\'s token"}}'


def new_token() -> str:
    """256 random bits as text."""
    return secrets.token_urlsafe(32)


def headers(token: str | None) -> dict[str, str]:
    """The header that carries the token; none for a server that asks for none (SGLang)."""
    return {} if token is None else {HEADER: SCHEME + token}


class TokenRequired:
    """ASGI middleware: every request but those to OPEN_PATHS must carry the token, or gets 401 unread."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._expected = (SCHEME + checked(token, "token")).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and (scope["path"] in OPEN_PATHS or self._allows(scope["headers"]))):
            await self._app(scope, receive, send)
        elif kind == "http":
            head = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allows(self, received: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in received if name == HEADER.encode()]
        # In constant time: how far a guess is right must not show.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def pipe_with(token: str) -> int:
    """A file descriptor that a child process reads the token from, once (`read_fd`)."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        pipe.write(token)
    return read


def read_fd(fd: int) -> str:
    """The token behind a descriptor, which is closed."""
    with os.fdopen(fd) as pipe:
        return checked(pipe.read(MAX_LENGTH + 1).strip(), f"file descriptor {fd}")


def read_file(path: Path) -> str:
    """The token in a file that nobody but its owner may read; `ConfigError` else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd) as file:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077 or not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{path}: the token must be in a file of yours with mode 0600; chmod 600 {path}")
            return checked(file.read(MAX_LENGTH + 1).strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token cannot be read: {error}") from None


def checked(token: str, where: str) -> str:
    """`ConfigError` for a text that is no token of ours: too short to be secret, or no header value."""
    if not (MIN_LENGTH <= len(token) <= MAX_LENGTH and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"{where}: a token has {MIN_LENGTH} to {MAX_LENGTH} printable characters without blanks")
    return token
