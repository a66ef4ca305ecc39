"""All trackers of a run: started when its first rows are known, fed row by row, ended with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles.observe.config import ObserveConfig
from miles.observe.trackers.process import TrackerProcess
from miles.observe.trackers.redaction import public_settings
from miles.observe.trackers.tensorboard_events import TensorBoardEvents
from miles.observe.trackers.tracker import TrackedRun

# Who stops a run wants it to end.
STOP_WAIT_S = 5.0


class Trackers:
    """`start`, `append` after each row of `metrics.jsonl`, `end` when it is finished, `close`, which alone may wait."""

    def __init__(
        self, config: ObserveConfig, *, name: str, folder: Path, settings: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._config, self._warn = config, warn
        self._name, self._folder = name, folder.absolute()
        self._settings = public_settings(settings, os.environ)
        self._events: TensorBoardEvents | None = None
        self._processes: list[TrackerProcess] = []
        self._finished = False

    def start(self, rows: Sequence[dict[str, Any]]) -> None:
        """`rows`: those of earlier lives, as `metrics.jsonl` has them."""
        for tracker in self._config.trackers:
            if tracker == "tensorboard":
                self._events = TensorBoardEvents(self._folder / "tensorboard", rows)
            else:
                section = self._config.wandb if tracker == "wandb" else self._config.mlflow
                run, options = TrackedRun(self._name, self._folder, self._settings), section.model_dump(mode="json")
                try:
                    self._processes.append(
                        TrackerProcess(tracker, run, options, finish_s=self._config.finish_s, warn=self._warn)
                    )
                except OSError as error:
                    self._warn(f"{tracker}: no process for it ({error.strerror}); the run goes on without")

    def append(self, row: dict[str, Any]) -> None:
        """`row` is in `metrics.jsonl`."""
        if self._events is not None:
            try:
                self._events.append(row)
            except Exception as error:
                self._events.close()
                self._events = None
                self._warn(f"tensorboard: no more events are written: {error}; the run goes on")
        for process in self._processes:
            process.row_written()

    def end(self) -> None:
        """The run came to its end: no further row comes."""
        self._finished = True
        for process in self._processes:
            process.end(finished=True)

    def close(self) -> None:
        """Wait for what is on its way: `observe.finish_s` at the end of a run, a moment when it stops before."""
        if self._events is not None:
            self._events.close()
        wait_s = self._config.finish_s
        if not self._finished:
            wait_s = min(wait_s, STOP_WAIT_S)
            for process in self._processes:
                process.end(finished=False)
        deadline = time.monotonic() + wait_s
        try:
            for process in self._processes:
                process.wait(deadline)
        finally:
            # Also when somebody is in a hurry.
            for process in self._processes:
                process.kill()
            self._processes.clear()
