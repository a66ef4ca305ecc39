"""Where results of parsing are kept between commands: outside the repository, in a folder of the user alone.

Whoever writes a commit writes every file of the tree, so a cache found there would be the word of the one who is to be
checked. On a machine of GitHub Actions code of pull requests may have run as the same user before: there none is used
unless `MILES_CI_CACHE_DIR` names one.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_ci.environment import read
from miles_ci.errors import UsageError
from miles_ci.files import write_whole

VARIABLE = "MILES_CI_CACHE_DIR"
MAX_BYTES = 64 << 20
# Entries of other trees and earlier contents that stay; a handful of branches of a large repository.
KEPT_UNUSED = 4096


def cache_folder(root: Path, environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder for a repository at `root`; None where there is none to trust. `UsageError`: it is named inside."""
    values = os.environ if environ is None else environ
    named = read(VARIABLE, values)
    if named is not None:
        if _inside(Path(named), root):
            raise UsageError(
                f"{VARIABLE}={named} lies in the repository, where a commit could fill it; name one outside"
            )
        return Path(named)
    if values.get("GITHUB_ACTIONS") == "true":
        return None
    base = values.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the XDG base directory specification.
    home = Path(base) if os.path.isabs(base) else Path(values.get("HOME") or os.path.expanduser("~")) / ".cache"
    folder = home / "miles-ci"
    return None if not home.is_absolute() or _inside(folder, root) else folder


def _inside(folder: Path, root: Path) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root))


def read_cache(folder: Path | None, name: str) -> Any:
    """The JSON value of a cache file; None where there is none, or others than this user could have written it."""
    if folder is None:
        return None
    try:
        if not _ours_alone(os.stat(folder)):
            return None
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as stream:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or not _ours_alone(status) or status.st_size > MAX_BYTES:
                return None
            return json.load(stream)
    except (OSError, ValueError, RecursionError):
        return None


def _ours_alone(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def write_cache(folder: Path | None, name: str, value: Any) -> None:
    """Write a cache file, atomically; what cannot be written is left out."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / name, json.dumps(value, separators=(",", ":")).encode(), mode=0o600, durable=False)
