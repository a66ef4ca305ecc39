"""What makes an interrupted conversion safe to go on with: the target's lock, and its journal of finished shards."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.config.files import storage_error, write_atomic
from miles.quant.convert.shards import Source
from miles.quant.errors import ConversionError

JOURNAL, COMPLETE = "journal.jsonl", "COMPLETE"
CHUNK = 1 << 22


class Journal:
    """Append-only JSON lines, each flushed to disk: a head that pins input and options, then one line per shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _entries(path) if path.exists() else []
        if path.exists():
            self._rewrite()

    def _rewrite(self) -> None:
        write_atomic(self.path, "".join(json.dumps(e) + "\n" for e in self.entries))

    def append(self, entry: dict) -> None:
        with open(self.path, "a") as f:
            f.write(json.dumps(entry) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self.entries.append(entry)

    def shards(self) -> dict[str, dict]:
        return _shards(self.entries)

    def has(self, path: Path) -> bool:
        """Is this shard finished and still what was written? Reads it."""
        return _is_whole(path, self.shards().get(path.name))


def _entries(path: Path) -> list[dict]:
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            break  # the line a crash cut off, and nothing after it
        if not isinstance(entry, dict):
            raise ConversionError(f"{path} is no journal of a conversion; choose another directory")
        found.append(entry)
    return found


def _shards(entries: list[dict]) -> dict[str, dict]:
    return {e["shard"]: e for e in entries if _is_shard(e)}


def _is_whole(path: Path, entry: dict | None) -> bool:
    if entry is None or not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return file_digest(path) == entry["sha256"]


def check_shards(directory: Path) -> int:
    """Reads every shard of a converted checkpoint; ConversionError names one that is not as it was written.

    Returns how many there are.
    """
    path = directory / JOURNAL
    if not path.is_file():
        raise ConversionError(f"{directory} has no {JOURNAL} to compare its shards with; leave --bytes out")
    known = _shards(_entries(path))
    shards = sorted({*known, *(file.name for file in directory.glob("*.safetensors"))})
    for shard in shards:
        if not _is_whole(directory / shard, known.get(shard)):
            raise ConversionError(
                f"{directory / shard}: not as the conversion wrote it; run that again with --resume, or copy the file again"
            )
    return len(shards)


def _is_shard(entry: dict) -> bool:
    kinds = {"shard": str, "bytes": int, "sha256": str, "tensors": list}
    return all(isinstance(entry.get(field), kind) for field, kind in kinds.items())


def file_digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(CHUNK):
            h.update(chunk)
    return h.hexdigest()


def check_target(source: Path, target: Path, *, resume: bool) -> None:
    """Refuses a target that holds something else; asked before a source is read, which may take minutes."""
    try:
        if not resume and (target / COMPLETE).exists():
            raise ConversionError(f"{target} is COMPLETE already; choose another directory")
        if target.exists() and not target.is_dir():
            raise ConversionError(f"{target} is a file; choose a directory to write")
        if target.exists() and target.resolve() == source.resolve():
            raise ConversionError(f"{target} is the source itself; choose another directory")
        if not resume and target.exists() and any(target.iterdir()):
            raise ConversionError(f"{target} is not empty; use --resume to continue, or another directory")
        if resume and target.exists() and any(target.iterdir()) and not (target / JOURNAL).exists():
            raise ConversionError(
                f"{target} has no {JOURNAL}: it is no interrupted conversion; choose another directory"
            )
    except OSError as error:
        raise storage_error(target, error) from error


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """One conversion at a time writes to `target`, which is made if it is missing. The lock leaves no file behind."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDONLY)
    except OSError as error:
        raise storage_error(target, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionError(
                f"{target}: another conversion writes there; wait for it to end, or choose another directory"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def open_journal(source: Source, target: Path, head: dict[str, Any]) -> Journal:
    """The target's journal, begun if it has none; ConversionError when it is that of another run or other files."""
    head = {**head, "source_files": source.files()}
    with saying_how_to_resume(target):
        journal = Journal(target / JOURNAL)
        if not journal.entries:
            journal.append(head)
    differing = sorted(k for k in head if journal.entries[0].get(k) != head[k])
    if differing:
        raise ConversionError(
            f"{target}: cannot resume, {', '.join(differing)} differ from the run that was interrupted; give the same "
            "source and options, or another directory"
        )
    for left in {*target.glob("*.tmp"), *target.glob(".*.tmp.*")}:
        if not left.is_dir():
            left.unlink()
    return journal


@contextlib.contextmanager
def saying_how_to_resume(target: Path) -> Iterator[None]:
    """A full disk or a lost folder becomes an error with place and fix; what is finished stays."""
    try:
        yield
    except OSError as error:
        place = storage_error(Path(error.filename or target), error)
        raise ConversionError(f"{place}; finished shards are kept: run again with --resume") from error
