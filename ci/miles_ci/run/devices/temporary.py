"""Temporary folders of leases, and the removal of those whose owners are dead.

A folder is locked (`flock` on the folder itself) by its runner and by the supervisors it starts; the kernel gives the
lock back when the last of them is gone, however it ended. Only folders of our own naming, user and kind are touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

from miles_ci.run.devices.locks import try_lock

_NAME = re.compile(r"mci-\d+-\w{8}")
# Between its creation and its lock a folder looks abandoned.
_YOUNG_S = 60.0


def make_folder(parent: Path | None) -> tuple[Path, int]:
    """A new folder and the descriptor that keeps it: hand it to whatever may outlive this process."""
    path = Path(tempfile.mkdtemp(prefix=f"mci-{os.getpid()}-", dir=parent))
    fd = _open(path)
    try_lock(fd)
    return path, fd


def remove_abandoned(parent: Path | None) -> list[Path]:
    """Remove the folders that killed runners left below `parent` (default: the system's temporary folder)."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(entry.name) and _is_abandoned(entry) and _remove(Path(entry.path)):
                    removed.append(Path(entry.path))
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    old = time.time() - found.st_ctime > _YOUNG_S
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and old


def _remove(path: Path) -> bool:
    fd = _open(path)
    try:
        if not try_lock(fd):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
