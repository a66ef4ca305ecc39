"""One start at a time, by a lock that ends with its holder; and waits that end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles.orchestrate.bounded import finishes_within
from miles.orchestrate.errors import RunError
from miles.orchestrate.start_turn import lock_path, start_turn

HOLD = (
    "import sys, time; from pathlib import Path; from miles.orchestrate.start_turn import start_turn\n"
    "with start_turn(Path(sys.argv[1]), print):\n"
    "    import subprocess; subprocess.Popen(['sleep', '30'], close_fds=False)\n"
    "    print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def test_a_turn_is_waited_for_told_once_and_bounded(tmp_path: Path, holder) -> None:
    notes: list[str] = []
    with pytest.raises(RunError, match=rf"another run \(process {holder.pid}\) has been starting Ray for 0.5 s"):
        with start_turn(tmp_path / "lock", notes.append, limit_s=0.5):
            pass
    assert notes == [f"waiting for another run to start Ray (process {holder.pid})"]


def test_a_killed_holder_gives_the_turn_up_though_its_children_live(tmp_path: Path, holder) -> None:
    os.kill(holder.pid, 9)
    holder.wait()
    notes: list[str] = []
    with start_turn(tmp_path / "lock", notes.append, limit_s=5):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_the_turn_goes_on_to_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        with start_turn(tmp_path / "lock", pytest.fail):
            pass
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_file_that_is_not_ones_own_orders_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    {"link": lambda: path.symlink_to(tmp_path / "other"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(RunError, match=r"lock: .*remove it, or set TMPDIR"):
        with start_turn(path, pytest.fail):
            pass
    assert not (tmp_path / "other").exists()


def test_each_user_has_a_lock() -> None:
    assert lock_path("/tmp") == Path(f"/tmp/miles-start-{os.getuid()}.lock")


def test_work_that_ends_is_waited_for_and_work_that_does_not_is_left() -> None:
    done: list[int] = []
    assert finishes_within(5, lambda: done.append(1))
    assert done == [1]
    started = time.monotonic()
    assert not finishes_within(0.1, lambda: time.sleep(30))
    assert time.monotonic() - started < 10


def test_an_error_of_the_work_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        finishes_within(5, lambda: 1 / 0)
