"""Replay of counted text edits on a checkout: `docker/edits/*.yaml` of `{file, find, replace, count}`.

A clean checkout of the commit comes first (`git checkout -f`), so a dirty tree cannot abort the replay. Every
edit is verified on the text before anything is written: `find` must occur exactly `count` times, or not at all
while `replace` occurs `count` times (already applied). Everything else refuses the whole set.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_ci.errors import CiError, UsageError
from miles_ci.files import write_whole
from miles_ci.workflows.model import parse_yaml

FIELDS = {"file", "find", "replace", "count"}


class EditRefused(CiError):
    """An edit does not fit; nothing was written. The text names file and pattern."""


@dataclass(frozen=True)
class Edit:
    file: str
    find: str
    replace: str
    count: int


@dataclass(frozen=True)
class Replayed:
    """`status` applied or already; one entry for each edit, in order."""

    edit: Edit
    status: str


def load_edits(path: Path) -> list[Edit]:
    """Read an edit file. `UsageError` names entry and field."""
    data = parse_yaml(path.read_text(encoding="utf-8"))
    entries = data.get("edits") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path}: expected a list under `edits`")
    return [_edit(path, at, entry) for at, entry in enumerate(entries, 1)]


def _edit(path: Path, at: int, entry: Any) -> Edit:
    if not isinstance(entry, dict) or set(entry) != FIELDS:
        raise UsageError(f"{path}: edit {at}: expected exactly the fields {', '.join(sorted(FIELDS))}")
    if not all(isinstance(entry[name], str) for name in ("file", "find", "replace")) or type(entry["count"]) is not int:
        raise UsageError(f"{path}: edit {at}: file, find, replace are text, count is a number")
    if not entry["find"] or entry["count"] < 1:
        raise UsageError(f"{path}: edit {at}: find must not be empty and count must be at least 1")
    if entry["file"].startswith("/") or ".." in entry["file"].split("/"):
        raise UsageError(f"{path}: edit {at}: file must stay inside the checkout")
    return Edit(**entry)


def clean_checkout(repo: Path, commit: str) -> None:
    """`git checkout -f`: local changes must not abort it; that is what this step is for."""
    done = subprocess.run(
        ["git", "-C", str(repo), "checkout", "-f", commit], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise EditRefused(f"{repo}: git checkout -f {commit}: {done.stderr.strip()}")


def replay_edits(repo: Path, edits: list[Edit]) -> list[Replayed]:
    """Verify all edits, then write all changed files. Raises `EditRefused` before any write."""
    texts: dict[str, str] = {}
    out: list[Replayed] = []
    for edit in edits:
        if edit.file not in texts:
            try:
                texts[edit.file] = (repo / edit.file).read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise EditRefused(f"{edit.file}: cannot be read: {error}") from error
        text = texts[edit.file]
        found = text.count(edit.find)
        if found == edit.count:
            texts[edit.file] = text.replace(edit.find, edit.replace)
            out.append(Replayed(edit, "applied"))
        elif found == 0 and edit.replace and text.count(edit.replace) == edit.count:
            out.append(Replayed(edit, "already"))
        else:
            raise EditRefused(
                f"{edit.file}: {edit.find!r} occurs {found} times, expected {edit.count}; "
                f"the replacement occurs {text.count(edit.replace) if edit.replace else 0} times: changed upstream?"
            )
    changed = {entry.edit.file for entry in out if entry.status == "applied"}
    for name in sorted(changed):
        write_whole(repo / name, texts[name].encode("utf-8"), mode=(repo / name).stat().st_mode & 0o777)
    return out


def mentions(folder: Path, word: str) -> list[str]:
    """Installed distribution metadata that still requires something with `word` in it (e.g. cu13)."""
    found = []
    for metadata in sorted(folder.glob("*.dist-info/METADATA")):
        for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Requires-Dist:") and word in line:
                found.append(f"{metadata.parent.name}: {line.removeprefix('Requires-Dist:').strip()}")
    return found
