"""TensorBoard event files of the numeric metrics.

Uses TensorBoard's own record writer; `torch.utils.tensorboard` would load a second or more of imports, and its
threaded writer reports a full disk late. A folder holds one event file: a resumed run writes what it kept into a new
one and removes the earlier ones, so that no reader finds a step twice.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles.config.files import storage_error
from miles.observe.trackers.tracker import numbers

PATTERN = "events.out.tfevents.*"


class TensorBoardEvents:
    """Writes scalars to one event file below `folder`, after those of `history`, the metrics rows of earlier lives.

    Nothing is loaded, written or removed before the first `append`.
    """

    def __init__(self, folder: Path, history: Sequence[dict[str, Any]] = ()) -> None:
        self._folder = folder
        self._history = list(history)
        self._file: Any = None
        self._records: Any = None

    def append(self, row: dict[str, Any]) -> None:
        """Write each number of a metrics row (except `step`) as a scalar at that step."""
        try:
            if self._records is None:
                self._open()
            self._write(row, time.time())
            self._records.flush()
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def _write(self, row: dict[str, Any], wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers(row)]
        event = Event(step=row["step"], wall_time=wall_time, summary=Summary(value=values))
        self._records.write(event.SerializeToString())

    def _open(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(self._folder.glob(PATTERN))
        times = {step: wall_time for path in earlier for step, wall_time in _wall_times(path)} if self._history else {}
        # The name that TensorBoard looks for; time in ns, host and process keep the files of two lives apart.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        # Under another name until the history is in it: a kill meanwhile leaves the earlier files as they were.
        temporary = self._folder / ".history.tmp"
        self._file = temporary.open("wb")
        self._records = RecordWriter(self._file)
        try:
            self._write_history(times)
            temporary.rename(self._folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        for path in earlier:
            path.unlink()

    def _write_history(self, times: dict[int, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for row in self._history:
            self._write(row, times.get(row["step"], time.time()))
        self._records.flush()
        self._history.clear()

    def close(self) -> None:
        # What a full disk refused was reported by `append`; closing would only say it again.
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()


def _wall_times(path: Path) -> Iterator[tuple[int, float]]:
    """(step, wall time) of an event file's whole records; a cut or damaged end is left out."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for record in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(record)
        if event.HasField("summary"):
            yield event.step, event.wall_time
