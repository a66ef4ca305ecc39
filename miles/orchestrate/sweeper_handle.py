"""The driver's side of `sweeper.py`: the mark of what the run starts, and a sweeper that is there as long as the run.

A sweeper that is killed or stopped is replaced; all of them read one pipe.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from miles.config import environment
from miles.orchestrate.process_mark import VARIABLE

SWEEP_WAIT_S = 30.0
# One that cannot even start is not started for ever.
MOST_SWEEPERS = 20
AGAIN_S = 0.2
STOPPING = b"e"

_marks: list[str] = []
# Of the cluster that this process started; Ray allows one.
_running: list[SweeperHandle] = []


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """A mark in the environment of whatever this process starts meanwhile; inside of another one, that one's."""
    if _marks:
        yield _marks[-1]
        return
    # A run that another one started has that one's mark, and gives it back.
    before, mark = environment.read("MILES_RUN_MARK"), secrets.token_hex(16)
    os.environ[VARIABLE] = mark
    _marks.append(mark)
    try:
        yield mark
    finally:
        _marks.remove(mark)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def announce_stop() -> None:
    """What the run started has a few seconds to end from now on; nothing where this process started no cluster.

    Ray's calls wait for ever for a daemon that is stopped or stuck: they return when it was killed.
    """
    for handle in _running:
        handle.stopping()


@contextlib.contextmanager
def sweeping(mark: str, folder: Path) -> Iterator[SweeperHandle]:
    """A sweeper for the run's processes and its folder. Until the end, signals that stop this process reach it, too."""
    handle = SweeperHandle(mark, folder)
    _running.append(handle)
    try:
        yield handle
    finally:
        _running.remove(handle)
        handle.sweep()


class SweeperHandle:
    """`stopping`, then `sweep`; both are allowed again."""

    def __init__(self, mark: str, folder: Path) -> None:
        program = str(Path(__file__).with_name("sweeper.py"))
        self._command = [sys.executable, "-I", program, mark, str(folder), str(os.getpid())]
        self._read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # Python's handlers wait for their turn, which one of Ray's calls may never give.
        self._wakes = threading.current_thread() is threading.main_thread()
        self._woken_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False) if self._wakes else -1
        self._told = b""
        self._closed = False
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, name="sweeper", daemon=True)
        self._keeper.start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=self._read, start_new_session=True)

    def _keep(self) -> None:
        """Until one has swept."""
        for _ in range(MOST_SWEEPERS):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            self._process.kill()  # stopped: it must not go on beside its successor
            if self._process.wait() == 0:
                return
            time.sleep(AGAIN_S)
            self._process = self._start()
            self._write(self._told)

    def stopping(self) -> None:
        """From now on the run's processes have a few seconds to end."""
        self._told = STOPPING
        self._write(STOPPING)

    def _write(self, text: bytes) -> None:
        if not self._closed:
            with contextlib.suppress(OSError):
                os.write(self._pipe, text)

    def sweep(self) -> None:
        """End what is left, now, and wait for that."""
        if not self._closed:
            self._closed = True
            if self._wakes:
                signal.set_wakeup_fd(self._woken_before)
            os.close(self._pipe)
            self._keeper.join(SWEEP_WAIT_S)
            os.close(self._read)
