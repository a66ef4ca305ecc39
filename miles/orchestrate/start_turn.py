"""Starts of Ray take turns: a machine with few processors starts one cluster at a time, and none of them too late.

The lock is the process's own and ends with it, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from miles.orchestrate.errors import RunError

LIMIT_S = 900.0
POLL_S = 0.1


def lock_path(base: str) -> Path:
    """One lock for each user of this machine."""
    return Path(base) / f"miles-start-{os.getuid()}.lock"


@contextlib.contextmanager
def start_turn(path: Path, note: Callable[[str], None], *, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Hold the turn; `note` is told once when another run has it. `RunError` after `limit_s`, or for a foreign file."""
    descriptor = _open(path)
    try:
        deadline, waited = time.monotonic() + limit_s, False
        while not _taken(descriptor):
            if not waited:
                note(f"waiting for another run to start Ray ({_holder(path)})")
                waited = True
            if time.monotonic() > deadline:
                raise RunError(
                    f"{path}: another run ({_holder(path)}) has been starting Ray for {limit_s:g} s; end it, or run the "
                    "same command again later"
                )
            time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise RunError(f"{path}: cannot be opened ({error.strerror}); remove it, or set TMPDIR") from None
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise RunError(f"{path}: is not a file of yours, so it cannot order your runs; remove it, or set TMPDIR")
    return descriptor


def _taken(descriptor: int) -> bool:
    # A record lock: no child inherits it, so it cannot outlive this process in one.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _holder(path: Path) -> str:
    text = ""
    with contextlib.suppress(OSError):
        # Asked while waiting only: closing a second descriptor gives up a lock that this process holds.
        text = path.read_text(encoding="utf-8", errors="replace").strip()[:20]
    return f"process {text}" if text.isdigit() else "its process is not known"
