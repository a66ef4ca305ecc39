"""The driver's end of a tracker's process: a byte for each row, never a wait before the end of the run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles.config.json_text import parse_json
from miles.observe.trackers import follower
from miles.observe.trackers.tracker import TrackedRun
from miles.observe.visible_text import visible

# A mark of the run's own processes, which are ended with the driver; this one has something to finish then.
RUN_MARK = "MILES_RUN_MARK"
MAX_ANSWER_BYTES = 1 << 16
# Beyond `finish_s`: a process whose driver was killed ends itself, hanging or not.
ALONE_MORE_S = 10.0


class TrackerProcess:
    """Started by the constructor; `row_written` for each row, `end`, `wait`, `kill`. `warn` is called once at most."""

    def __init__(
        self,
        tracker: str,
        run: TrackedRun,
        options: dict[str, Any],
        *,
        finish_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._tracker, self._warn = tracker, warn
        self._warned = self._counted = False
        self._said = b""
        spec = follower.Spec(
            tracker=tracker,
            path=[str(Path(entry).resolve()) for entry in sys.path],
            name=run.name,
            folder=str(run.folder),
            settings=run.settings,
            options=options,
            finish_s=finish_s + ALONE_MORE_S,
        )
        self._channel, theirs = socket.socketpair()
        # The training must not wait for a full pipe: the reader has enough to wake up for.
        self._channel.setblocking(False)
        with theirs, tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(asdict(spec)).encode())
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", follower.__file__, str(theirs.fileno())],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != RUN_MARK},
            )

    def row_written(self) -> None:
        """`metrics.jsonl` has one more row."""
        self._order(follower.NEW_ROW)
        if self._heard(0.0):
            self._tell("its process ended early")

    def end(self, *, finished: bool) -> None:
        """No further row comes."""
        self._order(follower.FINISHED if finished else follower.STOPPED)

    def wait(self, deadline: float) -> None:
        """Until the process has ended, at the latest at `deadline` (monotonic)."""
        while not (ended := self._heard(max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
            pass
        if not ended:
            self._tell("did not finish in time (observe.finish_s)")
        elif not self._counted:
            self._tell("its process ended early")

    def kill(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(order)

    def _heard(self, timeout_s: float) -> bool:
        """Take what the process says next; True when it has ended."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        try:
            said = self._channel.recv(MAX_ANSWER_BYTES)
        except OSError:
            said = b""
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            self._take(parse_json(line))
        return not said

    def _take(self, answer: dict[str, Any]) -> None:
        if "failure" in answer:
            self._tell(answer["failure"])
            return
        self._counted = True
        if answer["missing"]:
            self._tell(f"lacks {answer['missing']} rows")

    def _tell(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self._tracker}: {visible(what)}; the run goes on, metrics.jsonl has every row")
