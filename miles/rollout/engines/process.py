"""Start an engine process, wait for its report, and never leave it behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.rollout import access
from miles.rollout.errors import EngineModelError, EngineStartError

KILL_WAIT_S = 10.0
LOG_TAIL = 4000


@dataclass(slots=True)
class EngineHandle:
    """A running engine. `kill()` is idempotent and returns when the process is gone.

    `token`: what its routes want (`miles.rollout.access`), None for an engine that asks for none.
    """

    url: str
    pid: int
    token: str | None = field(default=None, repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def wait(self) -> int:
        """Block until the engine ends; its exit code."""
        return 0 if self._process is None else self._process.wait()

    def kill(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        # The engine's own process group: helpers it started go with it.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_WAIT_S)
                return

    def __enter__(self) -> EngineHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class StartingEngine:
    """An engine process on its way up: start several, then `wait_ready` each."""

    def __init__(
        self, command: list[str], *, environment: dict[str, str], log_path: Path | None, token: str | None = None
    ) -> None:
        """With `token`, the process reads it from the descriptor `--token-fd`."""
        self._log_path = log_path
        self._token = token
        read_fd, write_fd = os.pipe()
        passed = [write_fd]
        arguments = ["--ready-fd", str(write_fd), "--parent-pid", str(os.getpid())]
        if token is not None:
            passed.append(access.pipe_with(token))
            arguments += ["--token-fd", str(passed[-1])]
        log = open(log_path, "ab") if log_path is not None else None  # noqa: SIM115 - closed below
        try:
            self._process = subprocess.Popen(
                [*command, *arguments],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        finally:
            for fd in passed:
                os.close(fd)
            if log is not None:
                log.close()
        self._read_fd = read_fd

    def wait_ready(self, timeout_s: float) -> EngineHandle:
        """The handle, once the engine listens. `EngineModelError` or `EngineStartError` say why it does not."""
        report = self._report(timeout_s)
        handle = EngineHandle(report.get("url", ""), self._process.pid, self._token, self._process)
        if "url" in report:
            return handle
        handle.kill()
        if report.get("exit_code") == 2:
            raise EngineModelError(report["error"])
        raise EngineStartError(report["error"])

    def kill(self) -> None:
        """Give up an engine that is not waited for."""
        with contextlib.suppress(OSError):
            os.close(self._read_fd)
        EngineHandle("", self._process.pid, self._token, self._process).kill()

    def _report(self, timeout_s: float) -> dict[str, Any]:
        deadline, line = time.monotonic() + timeout_s, b""
        try:
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._read_fd], [], [], left)[0]:
                    return {
                        "error": f"engine process {self._process.pid}: not ready after {timeout_s:g} s{self._tail()}"
                    }
                piece = os.read(self._read_fd, 65536)
                if not piece:
                    code = self._process.wait(KILL_WAIT_S)
                    return {
                        "error": f"engine process {self._process.pid} ended with code {code} at start{self._tail()}"
                    }
                line += piece
        finally:
            os.close(self._read_fd)
        return json.loads(line)

    def _tail(self) -> str:
        if self._log_path is None or not self._log_path.exists():
            return " (its messages are on this process's stderr)"
        text = self._log_path.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
        return f"; end of {self._log_path}:\n{text}" if text else f"; {self._log_path} is empty"


def python_command(module: str) -> list[str]:
    return [sys.executable, "-m", module]
