"""TensorBoard event files of the numeric metrics.

Uses TensorBoard's own record writer; `torch.utils.tensorboard` would load a second or more of imports, and its
threaded writer reports a full disk late. Each life of a run writes one file; TensorBoard reads them as one curve.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from miles.config.files import storage_error


class TensorBoardEvents:
    """Writes scalars to one event file below `folder`; the library is loaded at the first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._records: Any = None

    def append(self, row: dict[str, Any]) -> None:
        """Write each number of a metrics row (except `step`) as a scalar at that step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in row.items()
            if tag != "step" and isinstance(value, int | float)
        ]
        try:
            if self._records is None:
                self._open(Event)
            event = Event(step=row["step"], wall_time=time.time(), summary=Summary(value=values))
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def _open(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for; time, host and process keep the files of two lives apart.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (self._folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._records.write(event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def close(self) -> None:
        # What a full disk refused was reported by `append`; closing would only say it again.
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
