"""What only Linux's kernel does for the supervisor: adopting orphans (prctl) and killing a whole cgroup at once.

Imported by the supervisor program: standard library only, cheap to import. Reading `/proc` is `process_tree`'s.
"""

from __future__ import annotations

import os
import time

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def make_cgroup(name: str) -> str | None:
    """The folder of a fresh cgroup v2 below our own, or None where that is not allowed (most containers)."""
    try:
        with open("/proc/self/cgroup") as file:
            own = next(line.split("::", 1)[1].strip() for line in file if line.startswith("0::"))
        with open("/proc/self/mountinfo") as file:
            mount = next(line.split()[4] for line in file if " - cgroup2 " in line)
        path = f"{mount}{own.rstrip('/')}/{name}"
        os.mkdir(path)
    except (OSError, StopIteration):
        return None
    if os.path.exists(f"{path}/cgroup.kill"):
        return path
    os.rmdir(path)
    return None


def enter_cgroup(path: str) -> None:
    """This process, and what it starts from now on."""
    _write(f"{path}/cgroup.procs", "0")


def kill_cgroup(path: str) -> None:
    """SIGKILL to every member, however many are born meanwhile."""
    _write(f"{path}/cgroup.kill", "1")


def remove_cgroup(path: str) -> None:
    """Members leave the list a moment after they are reaped."""
    for _ in range(20):
        try:
            os.rmdir(path)
            return
        except OSError:
            time.sleep(0.005)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        pass  # not allowed, or gone: descent by /proc finds the members all the same
