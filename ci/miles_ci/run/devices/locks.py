"""Lock files that hold a small JSON note: `flock`, given back by the kernel when the last holder is dead.

The note tells others what to expect (who, until when); nothing is wrong when it is missing or damaged.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_ci.errors import CiError, ExitCode


class LeaseError(CiError):
    """The lock folder cannot be used."""

    exit_code = ExitCode.INFRA


class FolderInUse(CiError):
    """Another runner writes its results into the same folder."""

    exit_code = ExitCode.CONFIG


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold a folder of results: two runners that share one would mix their events. Raises `FolderInUse`."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = open_lock(folder / ".lock")
    try:
        if not try_lock(fd):
            owner = read_json(fd).get("pid", "unknown")
            raise FolderInUse(
                f"{folder}: another run (pid {owner}) writes its results there; choose one with --results"
            )
        write_json(fd, {"pid": os.getpid()})
        yield
    finally:
        os.close(fd)


def open_lock(path: Path) -> int:
    """Open or create a lock file that every user of the host may lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise LeaseError(f"lock file {path}: {error.strerror}") from error
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, 0o666)
    return fd


def try_lock(fd: int) -> bool:
    """Lock now or not at all."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_json(fd: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(fd, 65536, 0) or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def write_json(fd: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
