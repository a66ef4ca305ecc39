"""All trackers of a run together: none of them can raise into the training."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.observe.config import ObserveConfig
from miles.observe.trackers.feed import Trackers


def trackers(folder: Path, warnings: list[str], *names: Any) -> Any:
    config = ObserveConfig(trackers=names)
    return closing(Trackers(config, name="run", folder=folder, settings={"a": 1}, warn=warnings.append))


def row(step: int) -> dict[str, Any]:
    return {"step": step, "train/loss": step / 4}


def test_tensorboard_gets_the_rows_of_this_life_after_those_of_earlier_ones(tmp_path: Path) -> None:
    warnings: list[str] = []
    with trackers(tmp_path, warnings, "tensorboard") as fed:
        fed.start([row(0), row(1)])
        fed.append(row(2))
        fed.end()
    (events,) = (tmp_path / "tensorboard").iterdir()
    read = EventAccumulator(str(events))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert warnings == []


def test_a_tensorboard_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    warnings: list[str] = []
    with trackers(tmp_path, warnings, "tensorboard") as fed:
        fed.start([])
        for step in range(3):
            fed.append(row(step))
    (warning,) = warnings
    assert warning.startswith("tensorboard: no more events are written: ")
    assert warning.endswith("; the run goes on")


def test_a_process_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    warnings: list[str] = []
    with trackers(tmp_path, warnings, "wandb", "mlflow") as fed:
        fed.start([])
        fed.append(row(0))
    assert warnings == [
        f"{name}: no process for it (Resource temporarily unavailable); the run goes on without"
        for name in ("wandb", "mlflow")
    ]


def test_no_tracker_leaves_nothing(tmp_path: Path) -> None:
    with trackers(tmp_path, []) as fed:
        fed.start([row(0)])
        fed.append(row(1))
    assert list(tmp_path.iterdir()) == []
