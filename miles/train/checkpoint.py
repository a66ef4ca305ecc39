"""Checkpoint folders that are whole or not there: `iter_<n>/` with one file per rank, `manifest.json` and `COMPLETE`.

Everything is written to `iter_<n>.tmp`, made durable, then renamed; an older `iter_<n>` is renamed aside first and
removed last, so a kill at any moment leaves the last complete checkpoint usable. A reader takes the newest one whose
files all match the manifest's sha256 and says which it skipped and why.

Knows nothing of megatron-core: tensors come and go under names the backend chooses. megatron-core's own
`dist_checkpointing` is not used (docs/decisions/0102-own-checkpoint-files.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config.files import storage_error, sync_folder, write_atomic
from miles.config.json_text import parse_json
from miles.train.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SCHEMA = 1
_NAME = re.compile(r"iter_(\d+)(\.old)?")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint. `kind`: what the backend calls it; `metadata`: small JSON of the writing rank."""

    name: str
    size: int
    sha256: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """`optimizer_steps`: by model (policy, critic). `mesh`: sizes of the parallel dimensions that wrote it; `extra`: the training loop's own state (JSON)."""

    step: int
    optimizer_steps: Mapping[str, int]
    family: str
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    files: Sequence[FileRecord]
    extra: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: Path) -> Manifest:
        """`CheckpointError` for anything but a manifest of this schema."""
        try:
            values = parse_json(text)
            if values["schema"] != SCHEMA:
                raise CheckpointError(
                    f"{where}: schema {values['schema']} is not {SCHEMA}; use the version that wrote it"
                )
            values["files"] = [FileRecord(**record) for record in values["files"]]
            for record in values["files"]:
                if not isinstance(record.name, str) or Path(record.name).name != record.name:
                    raise CheckpointError(f"{where}: {record.name!r} is no file of this folder")
            return cls(**values)
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where}: not a checkpoint manifest: {error}") from None


@dataclass(frozen=True)
class Skipped:
    """A candidate that was not used."""

    name: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from (None: start fresh) and what was passed over."""

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[Skipped, ...]


def begin(directory: Path, step: int) -> Path:
    """Create an empty `iter_<step>.tmp`, clearing what killed saves left; one rank calls this."""
    temporary = directory / f"iter_{step}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob("iter_*.tmp"):
            shutil.rmtree(stale)
        temporary.mkdir()
    except OSError as error:
        raise storage_error(temporary, error) from error
    return temporary


def write_tensors(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]
) -> FileRecord:
    """Write one rank's tensors durably; a full disk or an unwritable folder is a clear error."""
    from safetensors.torch import save

    path = folder / name
    data = save({key: value.detach().to("cpu").contiguous() for key, value in tensors.items()})
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(path, error) from error
    return FileRecord(name, len(data), hashlib.sha256(data).hexdigest(), dict(metadata))


def publish(temporary: Path, manifest: Manifest, *, keep: int) -> Path:
    """Write manifest and COMPLETE, rename into place, point `latest` at it, drop all but the newest `keep`."""
    directory = temporary.parent
    final = directory / f"iter_{manifest.step}"
    aside = directory / f"iter_{manifest.step}.old"
    try:
        write_atomic(temporary / "manifest.json", manifest.to_json())
        digest = hashlib.sha256((temporary / "manifest.json").read_bytes()).hexdigest()
        write_atomic(temporary / "COMPLETE", digest + "\n")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        temporary.rename(final)
        sync_folder(directory)
        write_atomic(directory / "latest", final.name + "\n")
        shutil.rmtree(aside, ignore_errors=True)
        for old in _complete_names(directory)[keep:]:
            shutil.rmtree(directory / old, ignore_errors=True)
    except OSError as error:
        raise storage_error(final, error) from error
    return final


def abandon(temporary: Path) -> None:
    """Remove a save that failed."""
    shutil.rmtree(temporary, ignore_errors=True)


def find(directory: Path) -> Found:
    """The newest complete checkpoint below `directory` that verifies.

    No complete one at all: `path` is None. Complete ones that are all damaged: an error that names each.
    """
    skipped: list[Skipped] = []
    damaged = False
    if directory.is_dir():
        skipped += [
            Skipped(path.name, "not complete: the save was interrupted")
            for path in sorted(directory.glob("iter_*.tmp"))
        ]
        for name in _candidates(directory):
            path = directory / name
            try:
                if not _is_complete(path):
                    skipped.append(Skipped(name, "not complete: COMPLETE is missing"))
                    continue
                return Found(path, verify(path), tuple(skipped))
            except CheckpointError as error:
                damaged = True
                skipped.append(Skipped(name, str(error)))
    if damaged:
        listed = "\n".join(f"  {item.name}: {item.reason}" for item in skipped)
        raise CheckpointError(
            f"{directory}: no checkpoint verifies; restore one of them or remove the folder to start fresh:\n{listed}"
        )
    return Found(None, None, tuple(skipped))


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every file has the recorded size and sha256; `CheckpointError` otherwise."""
    complete, listing = path / "COMPLETE", path / "manifest.json"
    expected, text = _read(complete), _read(listing)
    if re.fullmatch(rb"[0-9a-f]{64}\n", expected) is None:
        raise CheckpointError(f"{complete}: holds no sha256; the file was changed")
    if hashlib.sha256(text).hexdigest() != expected.decode().strip():
        raise CheckpointError(f"{listing}: differs from the sha256 in COMPLETE; one of the two was changed")
    manifest = Manifest.from_json(text.decode(errors="replace"), listing)
    for record in manifest.files:
        _verify_file(path / record.name, record)
    return manifest


def _verify_file(file: Path, record: FileRecord) -> None:
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise CheckpointError(f"{file}: is not a file")
        if size != record.size:
            raise CheckpointError(f"{file}: expected {record.size} bytes, got {size}")
        digest = _sha256(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    if digest != record.sha256:
        raise CheckpointError(f"{file}: expected sha256 {record.sha256}, got {digest}; the file was changed")


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is not a file")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_complete(path: Path) -> bool:
    """Whether the save came to its end; `CheckpointError` when that cannot be seen."""
    try:
        (path / "COMPLETE").lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return True


def _candidates(directory: Path) -> list[str]:
    """Names `iter_<n>` and `iter_<n>.old`, newest first."""
    try:
        found = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from None
    return [match.group() for match in sorted(found, key=lambda m: (-int(m.group(1)), bool(m.group(2))))]


def _complete_names(directory: Path) -> list[str]:
    return [name for name in _candidates(directory) if os.path.lexists(directory / name / "COMPLETE")]
