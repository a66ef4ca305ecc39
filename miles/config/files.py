"""Durable file writes: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from miles.config.errors import ConfigError


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write to a temporary name beside `path`, fsync, rename, fsync the folder."""
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error
    sync_folder(path.parent)


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
    }
    return ConfigError(f"{path}: {fixes.get(error.errno or 0, error.strerror or str(error))}")
