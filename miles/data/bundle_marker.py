"""`COMPLETE` of a replay bundle: which files it has, each with its sha256, and a digest of that list itself."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from miles.config import MilesError
from miles.config.files import write_atomic
from miles.config.json_text import parse_json

SCHEMA = 3
COMPLETE = "COMPLETE"
AGAIN = "copy the bundle again from its source"
_RANK = re.compile(r"rank_(\d+)\.(json|safetensors)")


class ReplayError(MilesError):
    """The bundle is incomplete, damaged, or does not fit this program."""

    exit_code = 2


def seal(folder: Path) -> None:
    """Write `COMPLETE` over all files of `folder`."""
    hashes = {path.name: _file_sha256(path) for path in sorted(folder.iterdir()) if path.name != COMPLETE}
    content = {"schema": SCHEMA, "sha256": hashes}
    write_atomic(folder / COMPLETE, json.dumps({**content, "digest": _digest(content)}, indent=1))


def verify(folder: Path) -> int:
    """The number of ranks whose files are all there as they were written. `ReplayError` names the file that is not."""
    marker = folder / COMPLETE
    if not marker.is_file():
        raise ReplayError(_no_bundle(folder))
    listed = _listed(marker)
    ranks = _complete_ranks(marker, listed)
    for name, expected in listed.items():
        path = folder / name
        if not path.is_file():
            raise ReplayError(f"{path}: missing; the bundle was copied in part, copy all of {folder.name}")
        actual = _file_sha256(path)
        if actual != expected:
            raise ReplayError(
                f"{path}: content changed since it was written (sha256 {actual[:12]}..., expected "
                f"{str(expected)[:12]}...); {AGAIN}"
            )
    for path in sorted(folder.iterdir()):
        # File browsers leave names with a dot behind.
        if path.name not in listed and path.name != COMPLETE and not path.name.startswith("."):
            raise ReplayError(f"{path}: not one of the files that {COMPLETE} lists; remove it, or {AGAIN}")
    return ranks


def read_json(path: Path) -> Any:
    """`ReplayError` when it is not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: cannot be read as JSON ({error}); {AGAIN}") from error


def _listed(marker: Path) -> dict[str, str]:
    content = read_json(marker)
    if not isinstance(content, dict):
        raise ReplayError(f"{marker}: not a list of this bundle's files; {AGAIN}")
    digest = content.pop("digest", None)
    # A list that was changed would blame the files that it names.
    if digest is not None and digest != _digest(content):
        raise ReplayError(f"{marker}: content changed since it was written; {AGAIN}")
    if content.get("schema") != SCHEMA:
        raise ReplayError(
            f"{marker}: schema {content.get('schema')!r}, this program reads {SCHEMA}; use the version that wrote it"
        )
    if digest is None or not isinstance(content.get("sha256"), dict):
        raise ReplayError(f"{marker}: not a list of this bundle's files with a digest of its own; {AGAIN}")
    return content["sha256"]


def _complete_ranks(marker: Path, listed: dict[str, str]) -> int:
    ranks = 1 + max((int(found[1]) for name in listed if (found := _RANK.fullmatch(name))), default=0)
    needed = ["manifest.json", *(f"rank_{rank}.{kind}" for rank in range(ranks) for kind in ("json", "safetensors"))]
    lacking = [name for name in needed if name not in listed]
    if lacking:
        raise ReplayError(f"{marker}: does not list {', '.join(lacking)}; {AGAIN}")
    return ranks


def _no_bundle(folder: Path) -> str:
    """Why a folder without COMPLETE cannot be replayed, and what there is instead."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        return (
            f"{folder}: {what}; give a step_<n> folder, as run.replay_steps writes them below the run's replay folder"
        )
    for parent in (folder, folder / "replay"):
        # Later optimizer steps on one rollout lie in folders of their own.
        found = [
            path.parent for inside in ("", "optimizer_step_*/") for path in parent.glob(f"{inside}step_*/{COMPLETE}")
        ]
        if found:
            return f"{folder}: not itself a bundle; give one of {', '.join(sorted(map(str, found), key=_place))}"
    return f"{folder}: no {COMPLETE} file, so this bundle was never finished; choose another step_<n> folder"


def _place(path: str) -> tuple[int, list[int]]:
    """Steps in their order, the first optimizer step of each rollout before the later ones."""
    numbers = [int(number) for number in re.findall(r"step_(\d+)", path)]
    return len(numbers), numbers


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
