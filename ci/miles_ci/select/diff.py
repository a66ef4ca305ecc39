"""What changed: the output of `git diff --name-status -z -M`, and the old contents of changed files."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_STATUSES = frozenset("ACDMRTUX")


class DiffError(Exception):
    """The diff cannot be read or obtained; whoever asked must select everything."""


@dataclass(frozen=True, slots=True)
class Change:
    """One changed path. `status` is git's letter; `old_path` is set for renames and copies."""

    status: str
    path: str
    old_path: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if self.old_path is None else (self.old_path, self.path)


def parse_name_status(output: bytes) -> list[Change]:
    """Parse NUL-separated name-status output. Raises `DiffError` when it is not of that form."""
    if not output:
        return []
    if not output.endswith(b"\0"):
        raise DiffError("the diff does not end with NUL: pass the output of `git diff --name-status -z -M`")
    fields = output[:-1].split(b"\0")
    changes: list[Change] = []
    index = 0
    while index < len(fields):
        status = fields[index].decode("ascii", "replace")
        letter = status[:1]
        if letter not in _STATUSES or (status[1:] and not status[1:].isdigit()):
            raise DiffError(f"unknown status {status!r} in the diff")
        count = 2 if letter in "RC" else 1
        names = fields[index + 1 : index + 1 + count]
        if len(names) < count or not all(names):
            raise DiffError(f"the diff ends within the entry {status!r}")
        try:
            paths = [name.decode("utf-8") for name in names]
        except UnicodeDecodeError as error:
            raise DiffError(f"a path in the diff is not UTF-8: {names!r}") from error
        changes.append(Change(letter, paths[-1], paths[0] if count == 2 else None))
        index += 1 + count
    return changes


def _git(root: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], input=stdin, capture_output=True, check=False)
    except OSError as error:
        raise DiffError(f"git cannot be started: {error}") from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip().split("\n")[0]
        raise DiffError(f"git {arguments[0]} failed: {message}")
    return done.stdout


def merge_base_with(root: Path, base: str) -> str:
    """The commit at which HEAD and `base` parted."""
    if base.startswith("-"):
        raise DiffError(f"'{base}' is no revision")
    return _git(root, "merge-base", base, "HEAD").decode().strip()


def changes_since(root: Path, base: str) -> tuple[str, list[Change]]:
    """(merge base, changes from it to the working tree, untracked files included)."""
    merge_base = merge_base_with(root, base)
    tracked = parse_name_status(_git(root, "diff", "--name-status", "-z", "-M", merge_base))
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")
    added = [Change("A", name.decode("utf-8", "surrogateescape")) for name in untracked if name]
    return merge_base, tracked + added


def contents_at(root: Path, revision: str, paths: list[str]) -> dict[str, bytes]:
    """Contents of the paths that exist at a revision, in one git process."""
    if not paths:
        return {}
    if any("\n" in path for path in paths):
        raise DiffError("a changed path contains a newline")
    request = "".join(f"{revision}:{path}\n" for path in paths).encode()
    output = _git(root, "cat-file", "--batch", stdin=request)
    result: dict[str, bytes] = {}
    position = 0
    for path in paths:
        end = output.index(b"\n", position)
        header = output[position:end]
        position = end + 1
        if header.endswith(b" missing"):
            continue
        size = int(header.rsplit(b" ", 1)[1])
        result[path] = output[position : position + size]
        position += size + 1
    return result
