"""The program that outlives a driver: it ends what names its folder and removes the folder."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles.orchestrate import sweeper_handle
from miles.orchestrate.process_mark import VARIABLE
from miles.orchestrate.sweeper_handle import announce_stop, marked, sweeping

SWEEPER = Path(__file__).resolve().parents[4] / "miles" / "orchestrate" / "sweeper.py"
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
    program = started(
        sys.executable, "-I", str(SWEEPER), "a-mark", str(folder), str(os.getpid()), stdin=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    program.stdin.close()
    assert program.wait(20) == 0
    assert agent.wait(5) == -9
    assert not folder.exists()
    assert stranger.poll() is None
    assert reader.poll() is None


def test_it_is_not_stopped_by_the_signals_that_stop_a_driver(tmp_path: Path, started) -> None:
    program = started(
        sys.executable, "-I", str(SWEEPER), "a-mark", str(tmp_path / "none"), str(os.getpid()), stdin=subprocess.PIPE
    )
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


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_lost_mark_title_and_parent_is_ended_because_it_was_seen(tmp_path: Path, started) -> None:
    """As Ray's agents: a daemon with the mark starts one without environment, in a session of its own, and ends."""
    pid_file = tmp_path / "pid"
    agent = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    daemon = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {agent!r}], env={{}}, start_new_session=True); time.sleep(120)"
    )
    first = started(sys.executable, "-c", daemon, env={**os.environ, VARIABLE: "the-mark"}, start_new_session=True)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    program = started(
        sys.executable, "-I", str(SWEEPER), "the-mark", str(tmp_path / "none"), str(os.getpid()), stdin=subprocess.PIPE
    )
    time.sleep(2.5)  # two looks
    first.kill()
    first.wait()
    orphan = psutil.Process(int(pid_file.read_text()))
    assert orphan.is_running()
    program.stdin.close()
    assert program.wait(20) == 0
    wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)


def quick_sweeper(folder: Path, **limits: float) -> Path:
    """The program with other limits."""
    text = SWEEPER.read_text()
    for name, value in limits.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1
    (folder / "sweeper.py").write_text(text)
    (folder / "process_mark.py").write_text(SWEEPER.with_name("process_mark.py").read_text())
    return folder / "sweeper.py"


@pytest.mark.parametrize("said", [b"e", b"\x02", b"\x0f", b"\x01"])
def test_a_driver_that_is_stopping_too_long_loses_its_processes_and_later_itself(
    tmp_path: Path, started, said: bytes
) -> None:
    # Tests of other processes have others.
    mark = secrets.token_hex(8)
    program = quick_sweeper(tmp_path, STOP_LIMIT_S=1.0, DRIVER_LIMIT_S=2.0)
    stopped = started(sys.executable, "-c", SLEEP, env={**os.environ, VARIABLE: mark}, start_new_session=True)
    stopped.send_signal(signal.SIGSTOP)
    driver = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-I', {str(program)!r}, {mark!r}, {str(tmp_path / 'none')!r}, str(os.getpid())],"
        " stdin=subprocess.PIPE)\n"
        "time.sleep(1.5); p.stdin.write(b'x'); p.stdin.flush(); print('not yet', flush=True)\n"
        "sys.stdin.readline()\n"
        # Again and again, which makes the time no longer.
        f"while True: p.stdin.write({said!r}); p.stdin.flush(); time.sleep(0.3)"
    )
    process = started(
        sys.executable, "-c", driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "not yet\n"
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(1.3)  # not before it is told
    process.stdin.write("now\n")
    process.stdin.flush()
    assert stopped.wait(20) == -9
    assert process.poll() is None
    assert process.wait(20) == -9
    assert process.stderr.readline().startswith("error: the run hung while it was stopping")


STUCK = """
import ctypes, os, signal, sys
from pathlib import Path
from miles.orchestrate import sweeper_handle
sweeper_handle.__file__ = sys.argv[1]
with sweeper_handle.marked() as mark, sweeper_handle.sweeping(mark, Path(sys.argv[2])):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("stuck", flush=True)
    lock(mutex)
"""


def test_a_signal_reaches_the_sweeper_of_a_driver_that_cannot_listen(tmp_path: Path, started) -> None:
    """Stuck in a call of another library, where Python runs no handler."""
    program = quick_sweeper(tmp_path, STOP_LIMIT_S=0.5, DRIVER_LIMIT_S=0.5)
    process = started(sys.executable, "-c", STUCK, str(program), str(tmp_path / "none"), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"stuck\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.terminate()
    assert process.wait(20) == -9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sweeper_that_is_killed_or_stopped_has_a_successor(tmp_path: Path, started, number: signal.Signals) -> None:
    folder = tmp_path / "miles-ray-test"
    folder.mkdir()
    with marked() as mark, sweeping(mark, folder) as handle:
        child = started(sys.executable, "-c", SLEEP, start_new_session=True)
        first = handle._process
        first.send_signal(number)
        wait_until(lambda: handle._process is not first)
        assert first.poll() == -9
        assert folder.exists()
        assert child.poll() is None
    assert child.wait(5) == -9
    assert not folder.exists()


def test_a_successor_is_told_of_the_stop(tmp_path: Path, started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_handle, "__file__", str(quick_sweeper(tmp_path, STOP_LIMIT_S=1.0)))
    with marked() as mark, sweeping(mark, tmp_path / "none") as handle:
        child = started(sys.executable, "-c", SLEEP, start_new_session=True)
        announce_stop()
        wait_until(lambda: not select.select([handle._read], [], [], 0)[0])  # the first has read it
        handle._process.kill()
        assert child.wait(20) == -9


def test_signals_go_where_they_went_before_once_the_run_is_swept(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        with marked() as mark, sweeping(mark, tmp_path / "none"):
            pass
        assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_a_sweeper_that_cannot_start_is_not_started_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_handle, "__file__", str(tmp_path / "nothing here"))
    monkeypatch.setattr(sweeper_handle, "MOST_SWEEPERS", 2)
    with marked() as mark, sweeping(mark, tmp_path / "none") as handle:
        wait_until(lambda: not handle._keeper.is_alive())


def test_a_mark_inside_of_a_mark_is_the_same_and_goes_with_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "of another run")
    with marked() as outer:
        with marked() as inner:
            assert inner == outer == os.environ[VARIABLE]
        assert os.environ[VARIABLE] == outer
        assert len(outer) == 32
    assert os.environ[VARIABLE] == "of another run"


def test_a_driver_that_was_gone_before_counts_as_gone(tmp_path: Path, started) -> None:
    gone = started(sys.executable, "-c", "pass")
    gone.wait()
    marked = started(sys.executable, "-c", SLEEP, env={**os.environ, VARIABLE: "m4"}, start_new_session=True)
    words = [sys.executable, "-I", str(SWEEPER), "m4", str(tmp_path / "none"), str(gone.pid)]
    assert started(*words, stdin=subprocess.PIPE).wait(20) == 0
    assert marked.wait(5) == -9


def test_the_end_of_the_driver_counts_even_where_a_child_holds_the_pipe(tmp_path: Path, started) -> None:
    marked = started(sys.executable, "-c", SLEEP, env={**os.environ, VARIABLE: "m3"}, start_new_session=True)
    driver = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-I', {str(SWEEPER)!r}, 'm3', {str(tmp_path / 'none')!r}, str(os.getpid())],"
        " stdin=subprocess.PIPE)\n"
        "if os.fork() == 0: time.sleep(30); os._exit(0)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = started(sys.executable, "-c", driver, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    assert marked.wait(10) == -9
    os.killpg(process.pid, signal.SIGKILL)
