"""The program that stands between the runner and one test: it owns the test's whole process tree.

Started by `miles_ci.run.process.supervisor_client`, one per test. Stdin brings the job; after that any byte, or the end of stdin (the runner is
gone), means cancel. Events go to stdout: `started`, `timeout`, `end`. Both in the form of `frame`. Being a
child subreaper it inherits whatever the test's processes leave behind, however they detached.
Leaves out: judging the result, output other than the log file. Standard library only, and little
of that, so that it starts in a few milliseconds; it runs no code of the test.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import sys
import time

from miles_ci.run.process import kernel, process_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STACKS_S = 2.0
TERM_S = 10.0
VERIFY_S = 5.0
LEFTOVER_GRACE_S = 0.5
LEFTOVER_TERM_S = 2.0
CANCEL_TERM_S = 1.5
CANCEL_VERIFY_S = 1.5


class Supervisor:
    """State of one supervised test; `run` returns when nothing of it is left (or cannot be removed)."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.main_pid = 0
        self.main_status: int | None = None
        self.cgroup: str | None = None
        self.cancelled = False
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)

    def run(self) -> None:
        started = time.monotonic()
        kernel.become_subreaper()
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        if self.job.get("cgroup", True):
            self.cgroup = kernel.make_cgroup(f"miles-ci-{os.getpid()}")
        error = self._spawn()
        if error is not None:
            emit(event="end", reason="spawn", error=error, wall_s=time.monotonic() - started)
            self._remove_cgroup()
            return
        emit(event="started", pid=self.main_pid, cgroup=self.cgroup)
        reason = self._wait(started + self.job["timeout_s"])
        wall_s = time.monotonic() - started
        leaked: list[process_tree.Process] = []
        if reason == "timeout":
            emit(event="timeout", after_s=self.job["timeout_s"])
            left = self._end_after_timeout()
        elif reason == "cancelled":
            left = self._terminate(CANCEL_TERM_S, CANCEL_VERIFY_S)
        else:
            leaked, left = self._clear_leftovers()
        self._remove_cgroup()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        emit(
            event="end",
            reason=reason,
            status=self.main_status,
            wall_s=wall_s,
            leaked=[describe(process) for process in leaked],
            survivors=[describe(process) for process in left],
            cpu_s=usage.ru_utime + usage.ru_stime,
            max_rss_mib=usage.ru_maxrss // 1024,
        )

    def _on_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self.cancelled = True

    def _spawn(self) -> str | None:
        """Fork and exec the test in its own session, output to the log file; returns why that failed, if so."""
        error_read, error_write = os.pipe()
        log = os.open(self.job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            self._become_test(error_write, log, null)
        os.close(error_write)
        os.close(log)
        os.close(null)
        self.main_pid = pid
        with os.fdopen(error_read, "rb") as pipe:
            message = pipe.read()
        return message.decode(errors="replace") or None

    def _become_test(self, error_write: int, log: int, null: int) -> None:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if self.cgroup is not None:
                kernel.enter_cgroup(self.cgroup)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for fd in self.job.get("private_fds", ()):
                os.close(fd)
            os.chdir(self.job["cwd"])
            argv = self.job["argv"]
            os.execvpe(argv[0], argv, self.job["env"])
        except BaseException as error:
            os.write(error_write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(127)

    def _wait(self, deadline: float) -> str:
        """Until the main process ends, the time is over, or the runner wants (or has found) its end."""
        while True:
            self._reap()
            if self.main_status is not None:
                return "exited"
            if self.cancelled:
                return "cancelled"
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            ready, _, _ = select.select([self.wake_read, sys.stdin.fileno()], [], [], min(left, 5.0))
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
            if sys.stdin.fileno() in ready:
                # A line or the end of the stream: both mean that the runner no longer wants the test.
                self.cancelled = True

    def _reap(self) -> None:
        for pid, status in process_tree.reap()[0]:
            self._reaped(pid, status)

    def _reaped(self, pid: int, status: int) -> None:
        if pid == self.main_pid:
            self.main_status = status

    def _gone_within(self, limit_s: float) -> bool:
        """Wait until no child is left; as subreaper, no child means no descendant."""
        deadline = time.monotonic() + limit_s
        pause = 0.002
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid:
                self._reaped(pid, status)
                continue
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.05)

    def _end_after_timeout(self) -> list[process_tree.Process]:
        asked = [
            process
            for process in process_tree.living_below(os.getpid())
            if process_tree.catches(process.pid, signal.SIGUSR1)
        ]
        process_tree.send(asked, signal.SIGUSR1)
        self._gone_within(STACKS_S if asked else 0.0)
        return self._terminate(self.job.get("term_s", TERM_S), self.job.get("verify_s", VERIFY_S))

    def _terminate(self, term_s: float, verify_s: float) -> list[process_tree.Process]:
        """SIGTERM, `term_s` seconds, SIGKILL; returns what is alive after `verify_s` more."""
        process_tree.send(process_tree.living_below(os.getpid()), signal.SIGTERM)
        if self._gone_within(term_s):
            return []
        left = process_tree.kill_all(os.getpid(), limit_s=verify_s, on_reaped=self._reaped, cgroup=self.cgroup)
        self._reap()
        return left

    def _clear_leftovers(self) -> tuple[list[process_tree.Process], list[process_tree.Process]]:
        if self._gone_within(0.0) or self._gone_within(self.job.get("leftover_grace_s", LEFTOVER_GRACE_S)):
            return [], []
        leaked = process_tree.living_below(os.getpid())
        described = [
            process_tree.Process(p.pid, p.parent, p.state, p.start, process_tree.command_of(p.pid, p.command))
            for p in leaked
        ]
        return described, self._terminate(LEFTOVER_TERM_S, self.job.get("verify_s", VERIFY_S))

    def _remove_cgroup(self) -> None:
        if self.cgroup is not None:
            kernel.remove_cgroup(self.cgroup)


def describe(process: process_tree.Process) -> dict[str, Any]:
    return {"pid": process.pid, "command": process_tree.command_of(process.pid, process.command)}


def frame(value: Any) -> bytes:
    """Ten digits of length, then the value in the interpreter's own form: both ends are the same interpreter."""
    data = marshal.dumps(value)
    return b"%010d" % len(data) + data


def emit(**event: Any) -> None:
    try:  # noqa: SIM105 - contextlib costs as much start-up time as all the rest
        os.write(1, frame(event))
    except OSError:
        pass  # the runner is gone; the tree is ended all the same


def read_job() -> dict[str, Any]:
    """Read unbuffered, since a cancel may follow at once."""
    job: dict[str, Any] = marshal.loads(_read_exactly(int(_read_exactly(10))))
    return job


def _read_exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            raise EOFError("the runner went away before it had sent the job")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    Supervisor(read_job()).run()
