"""Writing a file so that whoever reads it finds the old content or the new one, never a part; and what to do when
nobody reads any more."""

from __future__ import annotations

import contextlib
import itertools
import os
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
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def drop_output(stream: TextIO) -> None:
    """The reader of `stream` is gone: what is buffered and what follows goes nowhere, without a second error."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
