"""Processes below one process, read from /proc, and the ways to end all of them.

Works on any Linux without privileges. The root is expected to be a child subreaper, so that children which call
setsid or fork twice stay below it. Imported by the supervisor program: standard library only, cheap to import.
"""

from __future__ import annotations

import os
import signal
import time
from collections import namedtuple

from miles_ci.run.process import kernel

# `dataclasses` and `typing` would double the start-up time of the supervisor.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

COMMAND_LIMIT = 200


class Process(namedtuple("Process", ("pid", "parent", "state", "start", "command"))):
    """One entry of /proc. `start` (clock ticks since boot) tells a reused pid from the process meant."""

    __slots__ = ()
    pid: int
    parent: int
    state: str
    start: int
    command: str

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"


def read_process(pid: int, *, proc: str = "/proc") -> Process | None:
    """The process `pid`, or None when it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The name stands in brackets and may itself hold blanks and brackets.
    name_end = stat.rfind(b")")
    fields = stat[name_end + 2 :].split()
    name = stat[stat.find(b"(") + 1 : name_end].decode(errors="replace")
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]), name)


def command_of(pid: int, fallback: str = "", *, proc: str = "/proc") -> str:
    """The command line of a process, arguments joined by blanks; `fallback` when it cannot be read."""
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ")
    except OSError:
        return fallback
    return words.decode(errors="replace")[:COMMAND_LIMIT] or fallback


def all_processes(*, proc: str = "/proc") -> list[Process]:
    found = (read_process(int(name), proc=proc) for name in os.listdir(proc) if name.isdigit())
    return [process for process in found if process is not None]


def descendants(root: int, processes: Iterable[Process] | None = None) -> list[Process]:
    """Everything below `root`, parents before children, zombies included, `root` itself not."""
    children: dict[int, list[Process]] = {}
    for process in all_processes() if processes is None else processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(0), ()):
            found.append(child)
            queue.append(child.pid)
    return found


def living_below(root: int) -> list[Process]:
    return [process for process in descendants(root) if process.alive]


def catches(pid: int, number: int, *, proc: str = "/proc") -> bool:
    """Does the process handle this signal? One that does not would be killed by SIGUSR1."""
    try:
        with open(f"{proc}/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False


def send(processes: Iterable[Process], number: int) -> int:
    """Signal each process that is still the one meant; returns how many took it."""
    taken = 0
    for process in processes:
        now = read_process(process.pid)
        if now is None or now.start != process.start:
            continue
        try:
            os.kill(process.pid, number)
        except OSError:
            continue
        taken += 1
    return taken


def reap() -> tuple[list[tuple[int, int]], bool]:
    """Collect every child that has ended: [(pid, wait status)], and whether no child is left at all."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, True
        if pid == 0:
            return ended, False
        ended.append((pid, status))


def children_of(pid: int, *, proc: str = "/proc") -> list[Process] | None:
    """Direct children of every thread of `pid`; None where the kernel does not list them or the process is gone."""
    found: list[Process] = []
    try:
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with open(f"{proc}/{pid}/task/{thread}/children", "rb") as file:
                processes = (read_process(int(name), proc=proc) for name in file.read().split())
                found.extend(process for process in processes if process is not None)
    except OSError:
        return None
    return found


def freeze(
    root: int,
    *,
    until: float = float("inf"),
    children: Callable[[int], list[Process] | None] = children_of,
    find: Callable[[int], list[Process]] = living_below,
    deliver: Callable[[Iterable[Process], int], int] = send,
) -> list[Process]:
    """Stop everything below `root` with SIGSTOP and return it, also when it forks faster than /proc can be read.

    From the root down, each process is stopped before its children are read: a stopped process neither forks nor
    exits, so its list is final and the walk overtakes a chain of forks. What was orphaned on the way is a child of
    the root in the next walk. A walk that meets nothing new, confirmed by a scan of all processes, is the end;
    `until` (monotonic) bounds it.
    """
    stopped: dict[tuple[int, int], Process] = {}

    def stop(process: Process) -> bool:
        key = (process.pid, process.start)
        if not process.alive or key in stopped:
            return False
        deliver([process], signal.SIGSTOP)
        stopped[key] = process
        return True

    while time.monotonic() < until:
        fresh = 0
        queue = [root]
        while queue:
            for child in children(queue.pop()) or ():
                fresh += stop(child)
                queue.append(child.pid)
        if not fresh and not sum(map(stop, find(root))):
            break
    return list(stopped.values())


def kill_all(
    root: int,
    *,
    limit_s: float,
    on_reaped: Callable[[int, int], None],
    cgroup: str | None = None,
    stop_all: Callable[..., list[Process]] = freeze,
    find: Callable[[int], list[Process]] = living_below,
    deliver: Callable[[Iterable[Process], int], int] = send,
) -> list[Process]:
    """SIGKILL everything below `root`, which is this process; returns what is still alive after `limit_s`.

    The end is the kernel's word that no child is left: a subreaper without children has no descendants.
    """
    deadline = time.monotonic() + limit_s
    while True:
        if cgroup is not None:
            kernel.kill_cgroup(cgroup)
        deliver(stop_all(root, until=deadline, find=find, deliver=deliver), signal.SIGKILL)
        ended, childless = reap()
        for pid, status in ended:
            on_reaped(pid, status)
        left = find(root)
        if (childless and not left) or time.monotonic() >= deadline:
            # One that was forked while the time ran out must not live on.
            deliver(left, signal.SIGKILL)
            return left
        time.sleep(0.005)
