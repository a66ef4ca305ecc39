"""Durable file writes: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from miles.config.errors import ConfigError


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write to a temporary name beside `path`, fsync, rename, fsync the folder."""
    payload = data.encode() if isinstance(data, str) else data
    with replacing(path) as temporary:
        temporary.write_bytes(payload)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` to write to; make it durable and rename it, or remove it on any error."""
    # The suffix stays last: some writers choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError) -> ConfigError:
    """A message that names the path and what to do about it."""
    fixes = {
        errno.ENOSPC: "the disk is full; free space or choose another folder",
        errno.EDQUOT: "the disk quota is used up; free space or choose another folder",
        errno.EACCES: "permission denied; choose a folder that you may write",
        errno.EPERM: "operation not permitted; choose a folder that you may write",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.ENOTDIR: "a part of this path is a file; choose another folder",
        errno.EEXIST: "a file of this name is in the way; choose another folder",
        errno.EFBIG: "the limit on file sizes is reached (ulimit -f); raise it",
        errno.ENOENT: "a folder of this path does not exist; create it or choose another",
        errno.EISDIR: "a folder of this name is in the way; choose another name",
    }
    return ConfigError(f"{path}: {fixes.get(error.errno or 0, error.strerror or str(error))}")
