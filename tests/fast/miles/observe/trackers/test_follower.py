"""Following `metrics.jsonl`: every row once and in order, whatever the tracker does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miles.observe.trackers.follower import FINISHED, NEW_ROW, STOPPED, Driver, Follower, RowReader


class Store:
    """A tracker that outlives its openings; refuses the steps of `refused` once each, and to open `closed` times."""

    def __init__(self, held: Sequence[int] = (), refused: Sequence[int] = (), closed: int = 0) -> None:
        self.steps, self.refused, self.closed = list(held), list(refused), closed
        self.ends: list[bool] = []

    def open(self) -> int:
        if self.closed:
            self.closed -= 1
            raise ConnectionError("no server")
        return self.steps[-1] + 1 if self.steps else 0

    def append(self, row: dict[str, Any]) -> None:
        if row["step"] in self.refused:
            self.refused.remove(row["step"])
            raise RuntimeError(f"step {row['step']} refused")
        self.steps.append(row["step"])

    def close(self, *, finished: bool) -> None:
        self.ends.append(finished)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int, end: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps({"step": step}) + "\n" for step in steps) + end)


def follower(store: Store, metrics: Path) -> tuple[Follower, list[str]]:
    told: list[str] = []
    return Follower(lambda: store, RowReader(metrics), lambda error: told.append(str(error))), told


def test_rows_are_handed_over_as_they_come_and_a_half_one_later(metrics: Path) -> None:
    store = Store()
    following, told = follower(store, metrics)
    write(metrics, 0, 1, end='{"st')
    following.catch_up()
    assert store.steps == [0, 1]
    following.catch_up()
    write(metrics, end='ep": 2}\n')
    following.catch_up()
    assert store.steps == [0, 1, 2]
    following.close(finished=True)
    assert (store.ends, told, following.missing()) == ([True], [], 0)


def test_a_tracker_gets_what_follows_its_last_row(metrics: Path) -> None:
    store = Store(held=[0, 1, 2])
    following, _ = follower(store, metrics)
    write(metrics, *range(5))
    following.catch_up()
    assert store.steps == [0, 1, 2, 3, 4]


def test_a_row_that_failed_is_handed_over_again_by_a_new_opening(metrics: Path) -> None:
    store = Store(refused=[2])
    following, told = follower(store, metrics)
    write(metrics, *range(4))
    following.catch_up()
    assert (store.steps, told, following.missing()) == ([0, 1], ["step 2 refused"], 2)
    assert following.failed_at is not None
    following.catch_up()
    assert store.steps == [0, 1, 2, 3]
    assert store.ends == [False]
    assert (following.failed_at, following.missing()) == (None, 0)


def test_a_tracker_that_cannot_be_opened_misses_every_row_until_it_can(metrics: Path) -> None:
    store = Store(closed=2)
    following, told = follower(store, metrics)
    write(metrics, 0, 1)
    for _ in range(2):
        following.catch_up()
    assert (told, following.missing()) == (["no server"] * 2, 2)
    following.catch_up()
    assert (store.steps, following.missing()) == ([0, 1], 0)


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": "1"}', "\udcff", "[" * 50_000])
def test_a_file_that_was_changed_is_told(metrics: Path, line: str) -> None:
    following, told = follower(Store(), metrics)
    metrics.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    following.catch_up()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("said", "ending"), [(NEW_ROW, b""), (FINISHED, FINISHED), (STOPPED, STOPPED), (NEW_ROW + FINISHED, FINISHED)]
)
def test_what_the_driver_says_wakes_the_follower(said: bytes, ending: bytes) -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    with ours:
        driver = Driver(theirs, ended.set)
        ours.send(said)
        assert driver.wait(60) == ending
        assert ended.is_set() == bool(ending)
    # The driver is gone.
    assert ended.wait(60)
    assert driver.wait(60) == (ending or STOPPED)
    theirs.close()
