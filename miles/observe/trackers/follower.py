"""Program in a tracker's process: follow `metrics.jsonl` and hand its rows over, until the driver says that it ends.

    python -I follower.py SOCKET < spec.json

Standard input is a `Spec`. Over the socket, a descriptor, the driver sends one byte for each new row, `F` when the run is
finished, `S` when it stops before; its end means a driver that was killed. Back go JSON lines: `{"failure": text}` at each
failure and `{"missing": count}`, rows that could not be handed over, at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Found only when `main` knows where to look.
    from miles.observe.trackers.tracker import TrackedRun, Tracker

FINISHED, STOPPED, NEW_ROW = b"F", b"S", b"\n"
# After a failure; a row that failed is handed over again then.
RETRY_S = 10.0
LOCK_POLL_S = 0.1
MAX_FAILURE_CHARS = 1000


@dataclass(frozen=True)
class Spec:
    """`path`: where modules are looked for; `options`: the tracker's section of `observe`; `finish_s`: the process ends by itself so long after the driver did."""

    tracker: str
    path: list[str]
    name: str
    folder: str
    settings: dict[str, Any]
    options: dict[str, Any]
    finish_s: float


class Driver:
    """What the driver says, read by a thread, so that the end is seen while a tracker hangs."""

    def __init__(self, channel: socket.socket, on_end: Callable[[], None]) -> None:
        self._channel, self._on_end = channel, on_end
        self._changed = threading.Event()
        self._ending = b""
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, timeout_s: float | None) -> bytes:
        """Until there is something new or the time is over; `FINISHED` or `STOPPED` from the end of the run on."""
        self._changed.wait(timeout_s)
        if not self._ending:
            self._changed.clear()
        return self._ending

    def _read(self) -> None:
        while not self._ending:
            try:
                said = self._channel.recv(1 << 16)
            except OSError:
                said = b""
            self._ending = FINISHED if FINISHED in said else STOPPED if STOPPED in said or not said else b""
            if self._ending:
                self._on_end()
            self._changed.set()


class RowReader:
    """Whole rows of `metrics.jsonl` that were not read before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def start_over(self) -> None:
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row counts as read when the next one is asked for. `ValueError` for a line that is none."""
        from miles.config.json_text import parse_json

        with self._path.open("rb") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                row = parse_json(line)
                if not isinstance(row, dict) or type(row.get("step")) is not int:
                    raise ValueError(f"{self._path}: a line without a step")
                yield row
                self._offset += len(line)


class Follower:
    """Hands rows over. Opens the tracker at the first, and anew after a failure: it says where it stands."""

    def __init__(self, make: Callable[[], Tracker], reader: RowReader, tell: Callable[[BaseException], None]) -> None:
        self._make, self._reader, self._tell = make, reader, tell
        self._tracker: Tracker | None = None
        self._next = 0
        self.failed_at: float | None = None

    def catch_up(self) -> None:
        """Every row that is there; a failure is told and leaves the rest for later."""
        try:
            if self._tracker is None:
                self._tracker = self._opened()
            for row in self._reader.rows():
                if row["step"] >= self._next:
                    self._tracker.append(row)
                    self._next = row["step"] + 1
            self.failed_at = None
        except Exception as error:
            self._failed(error)

    def close(self, *, finished: bool) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close(finished=finished)
            except Exception as error:
                self._tell(error)

    def missing(self) -> int:
        """Rows of the file that the tracker did not take."""
        self._reader.start_over()
        return sum(row["step"] >= self._next for row in self._reader.rows())

    def _opened(self) -> Tracker:
        tracker = self._make()
        self._next = tracker.open()
        self._reader.start_over()
        return tracker

    def _failed(self, error: Exception) -> None:
        self._tell(error)
        self.failed_at = time.monotonic()
        if self._tracker is not None:
            with contextlib.suppress(Exception):
                self._tracker.close(finished=False)
            self._tracker = None


def _make(name: str, run: TrackedRun, options: dict[str, Any]) -> Tracker:
    from miles.observe.config import MlflowConfig, WandbConfig

    if name == "wandb":
        from miles.observe.trackers.weights_and_biases import WeightsAndBiases

        return WeightsAndBiases(run, WandbConfig(**options))
    from miles.observe.trackers.mlflow_store import MlflowStore

    return MlflowStore(run, MlflowConfig(**options))


def _follow(spec: Spec, driver: Driver, answer: Callable[[dict[str, Any]], None]) -> None:
    from miles.observe.trackers.redaction import without_secrets
    from miles.observe.trackers.tracker import TrackedRun

    folder = Path(spec.folder)
    run = TrackedRun(spec.name, folder, spec.settings)

    def tell(error: BaseException) -> None:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        answer({"failure": without_secrets(said, os.environ)[:MAX_FAILURE_CHARS]})

    follower = Follower(lambda: _make(spec.tracker, run, spec.options), RowReader(folder / "metrics.jsonl"), tell)
    with _sole(folder / "trackers" / f"{spec.tracker}.lock"):
        ending = b""
        while not ending:
            ending = driver.wait(None if follower.failed_at is None else RETRY_S)
            if ending or follower.failed_at is None or time.monotonic() >= follower.failed_at + RETRY_S:
                follower.catch_up()
        follower.close(finished=ending == FINISHED)
    answer({"missing": follower.missing()})


@contextlib.contextmanager
def _sole(path: Path) -> Iterator[None]:
    """One process a run and tracker: that of a killed driver still hands over what it had."""
    import fcntl

    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
        yield


def _end_late(finish_s: float) -> None:
    """End this process and all that it started, whatever hangs, `finish_s` from now."""
    timer = threading.Timer(finish_s, lambda: os.killpg(os.getpgid(0), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def main() -> None:
    """Standard streams lead nowhere once the spec is read: what a library asks or prints is nobody's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The driver says when it ends.
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    spec = Spec(**json.load(sys.stdin))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.path[:] = spec.path

    def answer(said: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps(said).encode() + b"\n")

    _follow(spec, Driver(channel, lambda: _end_late(spec.finish_s)), answer)


if __name__ == "__main__":
    main()
