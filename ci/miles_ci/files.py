"""Writing a file so that whoever reads it finds the old content or the new one, never a part; and what to do when
nobody reads any more."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
from pathlib import Path
from typing import TextIO

_numbers = itertools.count()


def write_whole(path: Path, data: bytes, *, mode: int | None = None, durable: bool = True) -> None:
    """Write under a temporary name beside `path`, then rename. Missing folders are made; on failure (`OSError`) no
    temporary file stays. `mode`: permission bits, by default those of any new file; `durable=False` skips fsync."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            # A full disk comes without a name, a refused folder with that of the temporary file.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_output(path: Path, data: bytes) -> None:
    """Write what a person asked for with `--out`: a regular file whole or not at all, behind the links that lead to it.

    What is no regular file (a pipe, a terminal, a device) is written into and stays what it is; so is our own
    standard output under another name. No folder is made: `OSError` names the one that is missing.
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            message = "no such folder to write into; make it first"
            raise FileNotFoundError(errno.ENOENT, message, str(target.parent)) from None
        write_whole(target, data)
        return
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder; name a file in it", str(path))
    streams = [stream for stream in (sys.stdout, sys.stderr) if _is_open_as(stream, there)]
    if not streams and stat.S_ISREG(there.st_mode):
        write_whole(Path(os.path.realpath(path)), data, mode=stat.S_IMODE(there.st_mode))
        return
    try:
        if streams:
            # `--out /dev/stdout > file`: a new file under its name would take the shell's place of output away.
            streams[0].flush()
            streams[0].buffer.write(data)
            streams[0].flush()
        else:
            with open(path, "wb") as file:
                file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_open_as(stream: TextIO, there: os.stat_result) -> bool:
    try:
        return hasattr(stream, "buffer") and os.path.samestat(os.fstat(stream.fileno()), there)
    except (OSError, ValueError):
        return False


def drop_output(stream: TextIO) -> None:
    """The reader of `stream` is gone: what is buffered and what follows goes nowhere, without a second error."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
