"""Process trees with real processes: whatever a test starts, however it hides, is gone afterwards."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci
from miles_ci.run.process import process_tree, supervisor_client, supervisor_main
from miles_ci.run.process.process_tree import Process
from miles_ci.run.process.supervisor_client import Command, Ended

register_cpu_ci(12, "stage-a-cpu")

DETACHED = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            open({pidfile!r}, "w").write(str(os.getpid()))
            {body}
        os._exit(0)
    os.wait()
    while not os.path.exists({pidfile!r}) or not open({pidfile!r}).read():
        time.sleep(0.01)
"""


def run(code: str, tmp_path: Path, **options: object) -> Ended:
    command = Command(
        argv=[sys.executable, "-S", "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        log=tmp_path / "log",
        **{"timeout_s": 20.0, "term_s": 0.3, "leftover_grace_s": 0.1, **options},  # type: ignore[arg-type]
    )
    return supervisor_client.run(command)


def detached(pidfile: Path, body: str = "time.sleep(60)") -> str:
    return textwrap.dedent(DETACHED).format(pidfile=str(pidfile), body=body)


def gone(pidfile: Path) -> bool:
    return process_tree.read_process(int(pidfile.read_text())) is None


def test_exit_code_and_output_are_those_of_the_main_process(tmp_path):
    ended = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", tmp_path)
    assert (ended.reason, ended.exit_code, ended.signal, ended.leaked) == ("exited", 7, None, ())
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_death_by_signal_is_told_apart_from_an_exit_code(tmp_path):
    ended = run("import os; os.kill(os.getpid(), 11)", tmp_path)
    assert (ended.reason, ended.exit_code, ended.signal) == ("exited", None, signal.SIGSEGV)


def test_program_that_cannot_be_started_says_why(tmp_path):
    command = Command(["/nothing/here"], tmp_path, {}, tmp_path / "log", 5.0)
    ended = supervisor_client.run(command)
    assert ended.reason == "spawn"
    assert "FileNotFoundError" in ended.error


def test_test_runs_in_its_own_session_with_empty_stdin(tmp_path):
    code = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    run(code, tmp_path)
    assert (tmp_path / "log").read_text().split() == ["True", "''"]


@pytest.mark.parametrize("cgroup", [True, False])
def test_setsid_grandchild_is_killed_after_a_timeout(tmp_path, cgroup):
    pidfile = tmp_path / "pid"
    code = detached(pidfile, "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)")
    ended = run(code + "time.sleep(60)\n", tmp_path, timeout_s=1.0, cgroup=cgroup)
    assert ended.reason == "timeout"
    assert ended.survivors == ()
    assert gone(pidfile)


def test_daemon_that_holds_stdout_does_not_keep_a_finished_test_waiting(tmp_path):
    pidfile = tmp_path / "pid"
    started = time.monotonic()
    ended = run(detached(pidfile), tmp_path)
    assert time.monotonic() - started < 10
    assert (ended.reason, ended.exit_code) == ("exited", 0)
    assert [left.pid for left in ended.leaked] == [int(pidfile.read_text())]
    assert gone(pidfile)


def test_child_that_ends_by_itself_within_the_grace_is_no_leak(tmp_path):
    ended = run(detached(tmp_path / "pid", "time.sleep(0.05); os._exit(0)"), tmp_path, leftover_grace_s=5.0)
    assert ended.leaked == ()


def test_tree_that_keeps_forking_is_ended(tmp_path):
    mark = f"forking-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
        import os, signal, sys, time  # {mark}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(3):
            os.fork()
        while True:
            if os.fork():
                time.sleep(0.01)
                os._exit(0)
            os.setsid()
    """
    ended = run(code + "\n", tmp_path, timeout_s=0.5, cgroup=False)
    # The first process exits at once; what it leaves behind goes on forking.
    assert ended.survivors == ()
    assert [p for p in process_tree.all_processes() if mark in process_tree.command_of(p.pid)] == []


class ForkingChain:
    """Every process forks one child and exits as soon as anybody looks at it, unless it has been stopped before."""

    def __init__(self, root: int) -> None:
        self.root, self.stopped = root, set[int]()
        self.parent = {2: root}
        self.looks = 0

    def children(self, pid: int) -> list[Process]:
        self.looks += 1
        found = [self._process(child) for child, parent in self.parent.items() if parent == pid]
        # Whoever runs has forked by now, and every third one is gone: its child is the root's.
        for child in [child for child in self.parent if child not in self.stopped and child + 1 not in self.parent]:
            if len(self.parent) < 60:
                self.parent[child + 1] = child
        for child in [child for child in self.parent if child not in self.stopped and child % 3 == 0]:
            if child + 1 in self.parent:
                self.parent[child + 1] = self.root
                del self.parent[child]
        return found

    def all(self, _root: int) -> list[Process]:
        return [self._process(child) for child in self.parent]

    def deliver(self, processes, number: int) -> int:
        self.stopped.update(process.pid for process in processes)
        return 1

    def _process(self, pid: int) -> Process:
        return Process(pid, self.parent[pid], "T" if pid in self.stopped else "S", 1, "chain")


def test_freeze_overtakes_a_chain_of_forks_and_knows_all_of_it():
    chain = ForkingChain(1)
    frozen = process_tree.freeze(1, children=chain.children, find=chain.all, deliver=chain.deliver)
    assert set(chain.parent) <= chain.stopped
    assert {process.pid for process in frozen} == chain.stopped


def test_freeze_works_where_the_kernel_does_not_list_children():
    chain = ForkingChain(1)
    chain.parent = {2: 1, 3: 2, 4: 1}
    process_tree.freeze(1, children=lambda pid: None, find=chain.all, deliver=chain.deliver)
    assert chain.stopped == {2, 3, 4}


def test_freeze_ends_at_its_limit_when_new_processes_never_stop_coming():
    born = iter(range(2, 10_000_000))
    started = time.monotonic()
    process_tree.freeze(
        1, until=started + 0.05, children=lambda pid: [], deliver=lambda processes, number: 0,
        find=lambda root: [Process(next(born), 1, "S", 1, "endless")],
    )  # fmt: skip
    assert time.monotonic() - started < 5


def test_stacks_of_all_threads_are_in_the_log_after_a_timeout(tmp_path):
    code = """
        import faulthandler, signal, threading, time
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        def waits_for_ever(): time.sleep(60)
        threading.Thread(target=waits_for_ever, daemon=True).start()
        def hangs(): time.sleep(60)
        hangs()
    """
    ended = run(code, tmp_path, timeout_s=0.5)
    assert ended.reason == "timeout"
    log = (tmp_path / "log").read_text()
    assert "hangs" in log
    assert "waits_for_ever" in log


def test_process_without_a_handler_is_not_killed_by_the_request_for_stacks(tmp_path):
    code = "import signal, time\nsignal.signal(15, lambda *_: (print('asked to end'), exit(0)))\ntime.sleep(60)"
    ended = run(code, tmp_path, timeout_s=0.5, term_s=5.0)
    assert ended.reason == "timeout"
    assert "asked to end" in (tmp_path / "log").read_text()


def test_cancel_ends_a_stubborn_tree_within_five_seconds(tmp_path):
    pidfile = tmp_path / "pid"
    ignoring = "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + detached(pidfile, ignoring) + "time.sleep(60)\n"
    cancel = threading.Event()
    command = Command([sys.executable, "-S", "-c", code], tmp_path, dict(os.environ), tmp_path / "log", 60.0)
    threading.Thread(target=lambda: (_until(pidfile.exists), cancel.set()), daemon=True).start()
    started = time.monotonic()
    ended = supervisor_client.run(command, cancel=cancel)
    assert ended.reason == "cancelled"
    assert time.monotonic() - started < 7.0
    assert gone(pidfile)


def test_tree_dies_with_its_runner(tmp_path):
    """A runner killed with SIGKILL can clean nothing up; its supervisors notice and do."""
    pidfile = tmp_path / "pid"
    program = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from miles_ci.run.process import supervisor_client
        code = {detached(pidfile) + "time.sleep(60)"!r}
        command = supervisor_client.Command([sys.executable, "-S", "-c", code], Path({str(tmp_path)!r}), dict(os.environ),
                                    Path({str(tmp_path / "log")!r}), 60.0)
        supervisor_client.run(command)
    """)
    pid = os.spawnve(os.P_NOWAIT, sys.executable, [sys.executable, "-c", program], _with_package())
    _until(lambda: pidfile.exists() and pidfile.read_text() != "")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _until(lambda: gone(pidfile))


def test_locks_handed_to_the_supervisor_are_closed_in_the_test(tmp_path):
    read, write = os.pipe()
    try:
        code = f"import os\ntry:\n os.fstat({write}); print('open')\nexcept OSError: print('closed')"
        run(code, tmp_path, private_fds=(write,))
    finally:
        os.close(read)
        os.close(write)
    assert (tmp_path / "log").read_text().strip() == "closed"


def test_what_survives_sigkill_is_reported():
    stuck = Process(4711, 1, "D", 1, "stuck in the driver")
    sent: list[int] = []
    left = process_tree.kill_all(
        os.getpid(),
        limit_s=0.05,
        on_reaped=lambda pid, status: None,
        stop_all=lambda root, **_: [stuck],
        find=lambda root: [stuck],
        deliver=lambda processes, number: sent.append(number) or 0,
    )
    assert left == [stuck]
    assert signal.SIGKILL in sent


def test_descendants_are_found_through_every_generation():
    table = [
        Process(2, 1, "S", 0, "a"),
        Process(3, 2, "Z", 0, "b"),
        Process(4, 3, "S", 0, "c"),
        Process(9, 8, "S", 0, "d"),
    ]
    assert [process.pid for process in process_tree.descendants(1, table)] == [2, 3, 4]


def test_process_name_with_blanks_and_brackets_is_read(tmp_path):
    folder = tmp_path / "12"
    folder.mkdir()
    (folder / "stat").write_bytes(b"12 (a (b) c) S 7 " + b" ".join(b"%d" % n for n in range(5, 30)))
    process = process_tree.read_process(12, proc=str(tmp_path))
    assert process is not None
    assert (process.parent, process.state, process.command) == (7, "S", "a (b) c")


def test_supervisor_adds_little_to_a_file(tmp_path):
    """Overhead is measured in benchmarks/ci_slots.py; here only that it is not of another order."""
    run("pass", tmp_path)
    times = []
    for _ in range(5):
        started = time.monotonic()
        ended = run("pass", tmp_path)
        times.append(time.monotonic() - started - ended.cpu_s)
    assert min(times) < 0.5


def test_waits_are_within_what_the_contract_promises():
    assert supervisor_main.STACKS_S == 2.0
    assert supervisor_main.TERM_S == 10.0
    assert supervisor_main.VERIFY_S == 5.0
    assert supervisor_main.CANCEL_TERM_S + supervisor_main.CANCEL_VERIFY_S <= 4.0


def _with_package() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(supervisor_client.__file__).resolve().parents[3])}


def _until(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_death_of_the_supervisor_itself_is_an_end_called_lost(tmp_path):
    code = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(60)"
    started = time.monotonic()
    ended = run(code, tmp_path)
    assert ended.reason == "lost"
    assert ended.survivors == ()
    assert time.monotonic() - started < 10
