"""The name under which a tracker knows a run: made once, kept in the run folder, so that a resumed run goes on there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from miles.config.errors import ConfigError
from miles.config.files import write_atomic
from miles.config.json_text import parse_json

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def known(folder: Path, tracker: str, *, where: str) -> str | None:
    """The id of an earlier life in the same place. `ConfigError` when the file holds something else."""
    path = _path(folder, tracker)
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    name = found.get("run_id") if isinstance(found, dict) else None
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise ConfigError(f"{path}: holds no run id; remove it, and the run goes on as a new one in {tracker}")
    return name if found.get("where") == where else None


def keep(folder: Path, tracker: str, run_id: str, *, where: str) -> None:
    """`where`: the store and project, without anything secret."""
    path = _path(folder, tracker)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps({"run_id": run_id, "where": where}) + "\n")


def _path(folder: Path, tracker: str) -> Path:
    return folder / "trackers" / f"{tracker}.json"
