"""The best checkpoint of a run: `best/step_<n>/` with `checkpoints/iter_<n>`, `hf_model/` and `best.json`, whole or not there.

A better one is written beside the one that is kept, renamed into place, and only then is the older removed: a kill at
any moment leaves the best so far. Nothing else of the run touches the folder, its retention of checkpoints included.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles.config import ConfigError
from miles.config.files import storage_error, sync_folder, write_atomic
from miles.config.json_text import parse_json

SCHEMA = 1
RECORD = "best.json"
_NAME = re.compile(r"step_(\d+)(\.old)?")


@dataclass(frozen=True)
class Best:
    """What is kept: the weights after `step` steps, whose `metric` was `value`."""

    path: Path
    step: int
    metric: str
    value: float

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / f"iter_{self.step}"

    @property
    def exported_model(self) -> Path:
        return self.path / "hf_model"


def read_best(directory: Path) -> Best | None:
    """The best that is kept below `directory`; None when there is none. `ConfigError` for a record that was changed."""
    found = list(_kept(directory))
    return max(found, key=lambda best: best.value, default=None)


def is_better(value: float, best: Best | None) -> bool:
    """An equal value keeps the earlier checkpoint; a value that is no number is never better."""
    return math.isfinite(value) and (best is None or value > best.value)


def begin(directory: Path, step: int) -> Path:
    """An empty folder to put `checkpoints/` and `hf_model/` into."""
    temporary = directory / f"step_{step}.tmp"
    try:
        directory.mkdir(exist_ok=True)
        for stale in directory.glob("*.tmp"):
            shutil.rmtree(stale)
        temporary.mkdir()
    except OSError as error:
        raise storage_error(temporary, error) from error
    return temporary


def publish(temporary: Path, *, step: int, metric: str, value: float) -> Best:
    """Make the filled folder the best, and remove the one before."""
    directory, final = temporary.parent, temporary.parent / f"step_{step}"
    aside = directory / f"step_{step}.old"
    try:
        record = {"schema": SCHEMA, "step": step, "metric": metric, "value": value}
        write_atomic(temporary / RECORD, json.dumps(record, indent=1) + "\n")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        temporary.rename(final)
        sync_folder(directory)
        for path in directory.iterdir():
            if path != final:
                shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise storage_error(final, error) from error
    return Best(final, step, metric, value)


def _kept(directory: Path) -> Iterator[Best]:
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if _NAME.fullmatch(path.name) is None or not (path / RECORD).exists():
            continue
        try:
            values = parse_json((path / RECORD).read_text(encoding="utf-8"))
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']}")
            yield Best(path, int(values["step"]), str(values["metric"]), float(values["value"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path / RECORD}: does not say which checkpoint this is ({type(error).__name__}: {error}); restore it, or "
                f"move {path} away"
            ) from None
