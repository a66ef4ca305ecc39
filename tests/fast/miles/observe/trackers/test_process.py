"""Real trackers in their real processes: killed, resumed, hanging, unreachable. No network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tracker_files import mlflow_points, mlflow_runs, offline_wandb

from miles.observe.trackers.process import TrackerProcess
from miles.observe.trackers.tracker import TrackedRun
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=60, suite="stage-a-cpu")

KEY = "0123456789abcdef0123456789abcdef01234567"
OPTIONS: dict[str, dict[str, Any]] = {
    "wandb": {"project": "miles", "entity": None, "mode": "offline"},
    "mlflow": {"uri": None, "experiment": "miles"},
}
LIMIT_S = 100.0


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


Start = Callable[..., TrackerProcess]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[TrackerProcess] = []

    def make(tracker: str, warn: Callable[[str], None] = pytest.fail, **options: Any) -> TrackerProcess:
        run = TrackedRun("a run", folder, {"train.lr": 0.5})
        started.append(TrackerProcess(tracker, run, {**OPTIONS[tracker], **options}, finish_s=10 * LIMIT_S, warn=warn))
        return started[-1]

    yield make
    for process in started:
        process.kill()


def write(folder: Path, steps: range) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(
                json.dumps({"step": step, "weight_version": step + 1, "train/loss": step / 4, "x": "NaN"}) + "\n"
            )


def held(tracker: str, folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every run that the tracker has."""
    if tracker == "mlflow":
        return mlflow_points(folder / "mlflow.db", "train/loss") if mlflow_runs(folder / "mlflow.db") else []
    return [(row["_step"], row["train/loss"]) for _, rows in offline_wandb(folder) for row in rows]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_of(process: TrackerProcess) -> list[psutil.Process]:
    pid = process._process.pid
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_killed_and_resumed_is_one_run_with_each_step_once(tracker: str, folder: Path, start: Start) -> None:
    write(folder, range(4))
    first = start(tracker)
    first.row_written()
    wait_until(lambda: len(held(tracker, folder)) > 0)
    os.killpg(first._process.pid, signal.SIGKILL)
    name = json.loads((folder / "trackers" / f"{tracker}.json").read_text())["run_id"]

    # The driver is killed: what it wrote is handed over, and nothing is left behind.
    write(folder, range(4, 6))
    second = start(tracker)
    second.row_written()
    second._channel.close()
    second._process.wait(LIMIT_S)
    assert held(tracker, folder) == [(step, step / 4) for step in range(6)]

    write(folder, range(6, 9))
    warnings: list[str] = []
    third = start(tracker, warnings.append)
    third.end(finished=True)
    third.wait(time.monotonic() + LIMIT_S)
    assert warnings == []
    assert held(tracker, folder) == [(step, step / 4) for step in range(9)]
    if tracker == "mlflow":
        assert mlflow_runs(folder / "mlflow.db") == {name: "FINISHED"}
    else:
        assert [run for run, _ in offline_wandb(folder)] == [name]


def test_two_lives_at_once_wait_for_each_other(folder: Path, start: Start) -> None:
    write(folder, range(3))
    lives = [start("mlflow"), start("mlflow")]
    for process in lives:
        process.end(finished=False)
    for process in lives:
        process.wait(time.monotonic() + LIMIT_S)
    assert [step for step, _ in held("mlflow", folder)] == [0, 1, 2]
    assert list(mlflow_runs(folder / "mlflow.db").values()) == ["KILLED"]


def test_a_server_that_never_answers_is_left_with_everything_that_was_started(folder: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        warnings: list[str] = []
        process = start("mlflow", warnings.append, uri=f"http://127.0.0.1:{server.getsockname()[1]}")
        write(folder, range(1))
        process.row_written()
        connection, _ = server.accept()
        with connection:
            members = group_of(process)
            process.end(finished=True)
            process.wait(time.monotonic() + 0.2)
            process.kill()
    assert warnings == [
        "mlflow: did not finish in time (observe.finish_s); the run goes on, metrics.jsonl has every row"
    ]
    _, alive = psutil.wait_procs(members, timeout=LIMIT_S)
    assert alive == []


def test_a_server_that_is_not_there_is_told_once_without_a_key(folder: Path, start: Start) -> None:
    warnings: list[str] = []
    with socket.socket() as closed:
        # Bound and not listening: nobody else gets the port.
        closed.bind(("127.0.0.1", 0))
        process = start("mlflow", warnings.append, uri=f"http://127.0.0.1:{closed.getsockname()[1]}/{KEY}")
        write(folder, range(2))
        process.row_written()
        process.end(finished=True)
        process.wait(time.monotonic() + LIMIT_S)
    (warning,) = warnings
    assert warning.startswith("mlflow: MlflowException: ")
    assert "[left out]" in warning
    assert KEY not in warning


def test_wandb_without_a_server_fails_alone_and_writes_no_key(
    folder: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        process = start("wandb", warnings.append, mode="online")
        write(folder, range(2))
        process.row_written()
        wait_until(lambda: process.row_written() or warnings != [])
        members = group_of(process)
        process.kill()
    assert len(warnings) == 1
    assert warnings[0].startswith("wandb: ")
    assert KEY not in warnings[0]
    _, alive = psutil.wait_procs(members, timeout=LIMIT_S)
    assert alive == []
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert written != []
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def test_a_process_that_dies_is_told_once(folder: Path, start: Start) -> None:
    warnings: list[str] = []
    process = start("mlflow", warnings.append)
    process._process.kill()
    process._process.wait()
    for _ in range(3):
        process.row_written()
    process.end(finished=True)
    process.wait(time.monotonic() + LIMIT_S)
    assert warnings == ["mlflow: its process ended early; the run goes on, metrics.jsonl has every row"]


def test_the_command_imports_no_tracker_to_start_one() -> None:
    code = "import sys, miles.orchestrate.train; print(sorted({'wandb', 'mlflow', 'tensorboard'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
