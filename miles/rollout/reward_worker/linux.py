"""The few calls of the Linux kernel that keep worker processes from outliving anybody."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int, parent: int) -> None:
    """This process gets the signal when its parent ends, and ends now if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Processes whose parent ends below this one become its children, so that it can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[tuple[int, int]]:
    """(pid, session) of this process' children, adopted ones included."""
    found, mine = [], os.getpid()
    try:
        # Not every kernel is built with it.
        listed = Path(f"/proc/self/task/{mine}/children").read_text().split()
    except OSError:
        listed = [name for name in os.listdir("/proc") if name.isdigit()]
    for name in listed:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in parentheses and may hold anything; behind it: state, parent, group, session.
            fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == mine:
                found.append((int(name), int(fields[3])))
    return found


def bounded_output(size: int) -> int:
    """A file in memory that takes `size` bytes and refuses more: standard output of a worker."""
    fd = os.memfd_create("reward-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def limit_memory(nbytes: int) -> None:
    """Address space of this process; no core files; the kernel ends this process before others when memory is short."""
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit_processor_time(seconds_more: float) -> None:
    """Second line behind the driver's clock: the kernel ends this process when it computes for much longer."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds_more) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
