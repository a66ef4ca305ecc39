"""The runner's side of one supervised process: start it, wait, cancel it, learn how it ended.

`run` blocks; call it from one thread per test. Whatever happens, when it returns nothing of the process tree is
left, or the result names the survivors.
"""

from __future__ import annotations

import marshal
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_ci.run.process import kernel, process_tree, supervisor_main

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
_BOOT = f"import sys; sys.path.insert(0, {_PACKAGE_PARENT!r}); from miles_ci.run.process.supervisor_main import main; main()"
# All the supervisor's own waits after the time limit, and some air: then the supervisor itself is stuck.
_OVERTIME_S = supervisor_main.STACKS_S + supervisor_main.TERM_S + supervisor_main.VERIFY_S + 15.0
_TICK_S = 0.1


@dataclass(frozen=True)
class Command:
    """What to run. Output of the whole tree goes to `log`; stdin is empty; `env` is the complete environment.

    `private_fds` stay open in the supervisor (they hold the device leases) and are closed in the test.
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    timeout_s: float
    private_fds: Sequence[int] = ()
    cgroup: bool = True
    term_s: float = supervisor_main.TERM_S
    verify_s: float = supervisor_main.VERIFY_S
    leftover_grace_s: float = supervisor_main.LEFTOVER_GRACE_S


@dataclass(frozen=True)
class Leftover:
    pid: int
    command: str


@dataclass(frozen=True)
class Ended:
    """How it ended. `reason`: exited, timeout, cancelled, spawn (never started), lost (the supervisor died).

    `exit_code` for a normal exit, `signal` for a death by signal, both None when the main process did not end by
    itself. `leaked`: what the test had left running when its main process ended. `survivors`: what could not be
    killed; such a machine must take no further test.
    """

    reason: str
    wall_s: float
    exit_code: int | None = None
    signal: int | None = None
    leaked: tuple[Leftover, ...] = ()
    survivors: tuple[Leftover, ...] = ()
    error: str = ""
    cpu_s: float = 0.0
    max_rss_mib: int = 0


@dataclass
class _Events:
    """Frames from the supervisor (`supervisor_main.frame`), in pieces as they arrive."""

    buffer: bytes = b""
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def feed(self, chunk: bytes) -> None:
        self.buffer += chunk
        while len(self.buffer) >= 10:
            end = 10 + int(self.buffer[:10])
            if len(self.buffer) < end:
                return
            event = marshal.loads(self.buffer[10:end])
            self.seen[event["event"]] = event
            self.buffer = self.buffer[end:]


def run(
    command: Command,
    *,
    cancel: threading.Event | None = None,
    on_tick: Callable[[], None] | None = None,
) -> Ended:
    """Run the command to its end under a supervisor. `on_tick` is called about ten times a second meanwhile."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=tuple(command.private_fds),
        start_new_session=True,
        bufsize=0,
    )
    events = _Events()
    try:
        _send_job(process, command)
        _follow(process, events, command.timeout_s, cancel, on_tick)
    finally:
        _close(process)
    end = events.seen.get("end")
    if end is None:
        return _lost(events, time.monotonic() - started)
    return _ended(end)


def _send_job(process: subprocess.Popen[bytes], command: Command) -> None:
    job = {
        "argv": [str(word) for word in command.argv],
        "cwd": str(command.cwd),
        "env": dict(command.env),
        "log": str(command.log),
        "timeout_s": command.timeout_s,
        "private_fds": list(command.private_fds),
        "cgroup": command.cgroup,
        "term_s": command.term_s,
        "verify_s": command.verify_s,
        "leftover_grace_s": command.leftover_grace_s,
    }
    assert process.stdin is not None
    view = memoryview(supervisor_main.frame(job))
    try:
        while view:
            view = view[os.write(process.stdin.fileno(), view) :]
    except BrokenPipeError:
        return  # it died at once: _follow meets the end of its output


def _follow(
    process: subprocess.Popen[bytes],
    events: _Events,
    timeout_s: float,
    cancel: threading.Event | None,
    on_tick: Callable[[], None] | None,
) -> None:
    """Read events until the supervisor closes its output; pass a cancel on; kill a supervisor that is stuck."""
    assert process.stdin is not None
    assert process.stdout is not None
    give_up = time.monotonic() + timeout_s + _OVERTIME_S
    cancel_sent = False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(_TICK_S):
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    return
                events.feed(chunk)
            if on_tick is not None:
                on_tick()
            if cancel is not None and cancel.is_set() and not cancel_sent:
                cancel_sent = True
                give_up = min(give_up, time.monotonic() + 4.0)
                process.stdin.close()
            if time.monotonic() > give_up:
                _kill_with_tree(process)
                return


def _kill_with_tree(process: subprocess.Popen[bytes]) -> None:
    """The supervisor does not answer: kill what is below it while it still holds the tree together, then it."""
    deadline = time.monotonic() + 1.0
    while below := process_tree.freeze(process.pid, until=deadline):
        process_tree.send(below, signal.SIGKILL)
        time.sleep(0.02)
    process.kill()


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        _kill_with_tree(process)
        process.wait()


def _lost(events: _Events, wall_s: float) -> Ended:
    """The supervisor ended without its report: end what it had started, through its cgroup or by descent."""
    started = events.seen.get("started")
    survivors: tuple[Leftover, ...] = ()
    if started is not None:
        if started["cgroup"] is not None:
            kernel.kill_cgroup(started["cgroup"])
        main = process_tree.read_process(started["pid"])
        tree: list[process_tree.Process] = []
        if main is not None:
            process_tree.send([main], signal.SIGSTOP)
            tree = [main, *process_tree.freeze(main.pid, until=time.monotonic() + supervisor_main.VERIFY_S)]
        process_tree.send(tree, signal.SIGKILL)
        time.sleep(0.05)
        left = [p for p in tree if (now := process_tree.read_process(p.pid)) is not None and now.alive]
        survivors = tuple(Leftover(p.pid, p.command) for p in left)
    return Ended("lost", wall_s, survivors=survivors, error="the supervisor ended without a report")


def _ended(end: dict[str, Any]) -> Ended:
    if end["reason"] == "spawn":
        return Ended("spawn", end["wall_s"], error=end["error"])
    status = end["status"]
    return Ended(
        reason=end["reason"],
        wall_s=end["wall_s"],
        exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
        leaked=tuple(Leftover(entry["pid"], entry["command"]) for entry in end["leaked"]),
        survivors=tuple(Leftover(entry["pid"], entry["command"]) for entry in end["survivors"]),
        cpu_s=end["cpu_s"],
        max_rss_mib=end["max_rss_mib"],
    )
