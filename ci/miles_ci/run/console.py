"""What a person sees while a shard runs: one group per test, child output that cannot give the runner commands.

Inside GitHub Actions `::group::` and `::stop-commands::`; elsewhere plain marker lines.
"""

from __future__ import annotations

import errno
import secrets
import sys
import threading
from pathlib import Path
from typing import TextIO

from miles_ci.files import drop_output

CHUNK = 1 << 16


class Console:
    """Thread-safe: a group is printed as a whole. `quiet` shows the logs of failures only."""

    def __init__(self, stream: TextIO | None = None, *, actions: bool = False, quiet: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._actions = actions
        self._quiet = quiet
        self._lock = threading.Lock()
        self._line_open = False

    def line(self, text: str) -> None:
        with self._lock:
            self._write(text + "\n")

    def log_of(self, title: str, log: Path, *, failed: bool) -> None:
        """The whole log of one ended process, as one group."""
        if self._quiet and not failed:
            return
        with self._lock:
            token = self._open(title)
            self._copy(log, 0)
            self._close(token)

    def follow(self, title: str, log: Path) -> LogFollower:
        """Open a group and copy the log as it grows. Nothing else prints until the follower is closed."""
        self._lock.acquire()
        return LogFollower(self, self._open(title), log)

    def _open(self, title: str) -> str:
        if not self._actions:
            self._write(f"===== {title}\n")
            return ""
        token = secrets.token_hex(16)
        self._write(f"::group::{title}\n::stop-commands::{token}\n")
        return token

    def _close(self, token: str) -> None:
        # A process that was killed leaves half a line, and what follows must not be glued to it.
        if self._line_open:
            self._write("\n")
        if token:
            self._write(f"::{token}::\n::endgroup::\n")

    def _copy(self, log: Path, offset: int) -> int:
        try:
            with open(log, "rb") as file:
                file.seek(offset)
                while chunk := file.read(CHUNK):
                    self._write(chunk.decode(errors="replace"))
                return file.tell()
        except FileNotFoundError:
            return offset

    def _write(self, text: str) -> None:
        self._line_open = not text.endswith("\n") if text else self._line_open
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # Whoever read us (or the terminal) is gone; the results file still gets everything, and the exit code is that of the tests.
            drop_output(self._stream)
        except ValueError:
            pass  # closed


class LogFollower:
    def __init__(self, console: Console, token: str, log: Path) -> None:
        self._console, self._token, self._log, self._offset = console, token, log, 0

    def tick(self) -> None:
        self._offset = self._console._copy(self._log, self._offset)

    def close(self) -> None:
        self.tick()
        self._console._close(self._token)
        self._console._lock.release()
