"""TensorBoard's event files: each step once, whatever was killed."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest

from miles.config import ConfigError
from miles.observe.trackers.tensorboard_events import TensorBoardEvents


def row(step: int, reward: float = 0.5) -> dict[str, Any]:
    return {"step": step, "rollout/reward_mean": reward, "train/loss": -0.25, "time/step": 0.07}


def scalars(folder: Path, tag: str) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.iterdir()
    read = EventAccumulator(str(file))
    read.Reload()
    return read.Scalars(tag)


def test_resumed_run_leaves_one_event_file_with_each_step_once_at_its_time(tmp_path: Path) -> None:
    killed = TensorBoardEvents(tmp_path)
    for step in range(5):
        killed.append(row(step, reward=9.0))
    killed.close()
    (file,) = tmp_path.iterdir()
    first_life = scalars(tmp_path, "train/loss")
    file.write_bytes(file.read_bytes()[:-7])
    # A kill while an earlier resume wrote its history.
    (tmp_path / ".history.tmp").write_bytes(b"half")
    kept = [{**row(step, reward=step / 4), "train/loss": "NaN"} for step in range(3)]
    resumed = TensorBoardEvents(tmp_path, kept)
    assert file.exists()
    for step in (3, 4):
        resumed.append(row(step, reward=step / 4))
    resumed.close()
    found = scalars(tmp_path, "rollout/reward_mean")
    assert [(e.step, e.value) for e in found] == [(step, step / 4) for step in range(5)]
    assert [e.wall_time for e in found[:3]] == [e.wall_time for e in first_life[:3]]
    assert [math.isnan(e.value) for e in scalars(tmp_path, "train/loss")] == [True] * 3 + [False] * 2


def test_run_that_starts_over_drops_the_events_of_its_earlier_life(tmp_path: Path) -> None:
    for _ in range(2):
        events = TensorBoardEvents(tmp_path)
        events.append(row(0))
        events.close()
    assert [e.step for e in scalars(tmp_path, "train/loss")] == [0]


def test_history_that_does_not_fit_on_the_disk_leaves_the_earlier_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = TensorBoardEvents(tmp_path)
    events.append(row(0))
    events.close()
    before = list(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.flush", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        TensorBoardEvents(tmp_path, [row(0)]).append(row(1))
    assert list(tmp_path.iterdir()) == before


def test_tensorboard_reads_the_numbers_of_a_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = TensorBoardEvents(tmp_path)
    for step in range(3):
        events.append({**row(step, step / 4), "note": "text is left out"})
    events.close()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    read = EventAccumulator(str(file))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("rollout/reward_mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert set(read.Tags()["scalars"]) == set(row(0)) - {"step"}


def test_tensorboard_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    events = TensorBoardEvents(tmp_path / "file" / "tensorboard")
    with pytest.raises(ConfigError, match="a part of this path is a file"):
        events.append(row(0))
    events.close()
