"""TensorBoard event files of the numeric metrics.

Uses TensorBoard's own event writer; `torch.utils.tensorboard` would load a second or more of imports.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class TensorBoardEvents:
    """Writes scalars to one event file below `folder`; the library is loaded at the first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def append(self, row: dict[str, Any]) -> None:
        """Write each number of a metrics row (except `step`) as a scalar at that step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
        values = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in row.items()
            if tag != "step" and isinstance(value, int | float)
        ]
        self._writer.add_event(Event(step=row["step"], wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
