"""`metrics.jsonl`: one JSON object a step, the record that every other view is made from.

Rows are appended and flushed as steps finish. After a kill the last row may be cut or lie beyond the
checkpoint that the run resumes from: `rewind` removes both, so that the finished file reads as if the run
had never stopped.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Self

from miles.config.errors import MilesError
from miles.config.files import storage_error, write_atomic


class MetricsLogError(MilesError):
    """The metrics log cannot be read."""


class MetricsLog:
    """Appends rows to `path`. Non-finite numbers are written as the strings "NaN", "Infinity", "-Infinity"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and hand it to the operating system (a killed process loses no finished row)."""
        try:
            self._file.write(json.dumps({key: _plain(value) for key, value in row.items()}) + "\n")
            self._file.flush()
        except OSError as error:
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
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise MetricsLogError(f"{path}:{number}: not a JSON object: {error.msg}") from None
    return rows


def rewind(path: Path, *, first_dropped_step: int) -> list[dict[str, Any]]:
    """Keep only rows with `step < first_dropped_step`; returns them."""
    kept = [row for row in read_rows(path) if row["step"] < first_dropped_step]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
