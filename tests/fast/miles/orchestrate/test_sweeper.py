"""The program that outlives a driver: it ends what names its folder and removes the folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from miles.orchestrate import sweeper

SLEEP = "import time; time.sleep(120)"


@pytest.fixture
def started():
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **options) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(words, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_the_end_of_the_pipe_ends_every_member_and_removes_the_folder(tmp_path: Path, started) -> None:
    folder = tmp_path / "miles-ray-test"
    (folder / "session").mkdir(parents=True)
    agent = started(sys.executable, "-c", SLEEP, f"--session-dir={folder}/session", start_new_session=True)
    stranger = started(sys.executable, "-c", SLEEP, f"--session-dir={tmp_path}/miles-ray-other")
    reader = started("tail", "-f", "-n", "0", "--retry", f"{folder}/log", stderr=subprocess.DEVNULL)
    program = started(sys.executable, "-I", sweeper.__file__, str(folder), stdin=subprocess.PIPE)
    program.stdin.write(b"alive")
    program.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    program.stdin.close()
    assert program.wait(20) == 0
    assert agent.wait(5) == -9
    assert not folder.exists()
    assert stranger.poll() is None
    assert reader.poll() is None


def test_it_is_not_stopped_by_the_signals_that_stop_a_driver(tmp_path: Path, started) -> None:
    program = started(sys.executable, "-I", sweeper.__file__, str(tmp_path / "none"), stdin=subprocess.PIPE)
    # Its handlers are set once it sleeps in the read of the pipe.
    process = psutil.Process(program.pid)
    while process.status() != psutil.STATUS_SLEEPING or not _ignores(program.pid, 15):
        assert program.poll() is None
    program.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.2)
    program.stdin.close()
    assert program.wait(20) == 0


def _ignores(pid: int, number: int) -> bool:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigIgn"], 16) & (1 << (number - 1)))
