"""`metrics.jsonl`: one JSON object a step, the record that every other view is made from.

Rows are appended and flushed as steps finish. After a kill the last row may be cut or lie beyond the
checkpoint that the run resumes from: `rewind` removes both, so that the finished file reads as if the run
had never stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, Self

from miles.config.errors import ConfigError
from miles.config.files import storage_error, write_atomic
from miles.config.json_text import parse_json


class MetricsLogError(ConfigError):
    """The metrics log cannot be read or lacks rows: it was changed from outside."""


class MetricsLog:
    """Appends rows to `path`. Non-finite numbers are written as the strings "NaN", "Infinity", "-Infinity"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Unbuffered: what a failed write leaves is on the disk, where it can be cut off, not in a buffer.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise storage_error(path, error) from error

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and hand it to the operating system (a killed process loses no finished row).

        A row that does not fit on the disk leaves no part of itself.
        """
        line = (json.dumps({key: _plain(value) for key, value in row.items()}) + "\n").encode()
        size = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise storage_error(self._path, error) from error

    def sync(self) -> None:
        """Make all rows durable."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error(self._path, error) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows in order. A last line without its newline is the mark of a kill and is left out."""
    if not path.exists():
        return []
    if not path.is_file():
        raise MetricsLogError(f"{path}: is not a file; move it away, or use --fresh to start the run over")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise storage_error(path, error) from error
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise MetricsLogError(
                f"{path}:{number}: not a JSON object with a step; the file was changed: restore it, or use --fresh to "
                "start the run over"
            )
        rows.append(row)
    return rows


def require_steps(path: Path, rows: list[dict[str, Any]], count: int, *, needed_by: str) -> None:
    """Raise `MetricsLogError` unless `rows` are those of steps 0 to `count` - 1, each once and in order."""
    steps = [row["step"] for row in rows]
    if steps == list(range(count)):
        return
    missing = sorted(set(range(count)) - set(steps))
    lost = f"step {missing[0]} is the first one missing" if missing else "some are double or out of order"
    raise MetricsLogError(
        f"{path}: holds {len(rows)} rows, {needed_by} needs {count} ({lost}); restore the file, or use --fresh to "
        "start the run over"
    )


def rewind(path: Path, *, first_dropped_step: int) -> list[dict[str, Any]]:
    """Keep only rows with `step < first_dropped_step`; returns them.

    Raises `MetricsLogError`, and changes nothing, when one of these steps has no row.
    """
    kept = [row for row in read_rows(path) if row["step"] < first_dropped_step]
    require_steps(path, kept, first_dropped_step, needed_by=f"the checkpoint after step {first_dropped_step}")
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
