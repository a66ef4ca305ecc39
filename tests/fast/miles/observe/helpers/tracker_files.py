"""What a tracker holds, read from its files without its client."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

BLOCK, HEADER, FIRST_BYTES = 32768, 7, 7
FULL, LAST = 1, 4


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, which a `.wandb` file is behind its first bytes; a cut end is left out."""
    position, record = FIRST_BYTES, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + HEADER : position + HEADER + size]
        position += HEADER + size
        if kind in (FULL, LAST):
            yield record
            record = b""


def offline_wandb(folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(run id, rows by metric name) of each offline run below `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        rows = []
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
                rows.append({name: json.loads(value) for name, value in items.items()})
        found.append((path.stem.removeprefix("run-"), rows))
    return found


def mlflow_runs(database: Path) -> dict[str, str]:
    """Run id -> status."""
    if not database.exists():
        return {}
    with closing(sqlite3.connect(database)) as connection:
        # The tables come after the file.
        if not connection.execute("select 1 from sqlite_master where name = 'runs'").fetchall():
            return {}
        return dict(connection.execute("select run_uuid, status from runs"))


def mlflow_points(database: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every point, of all runs, in the order of steps; not-a-number as None."""
    with closing(sqlite3.connect(database)) as connection:
        query = "select step, case is_nan when 1 then null else value end from metrics where key = ? order by step"
        return list(connection.execute(query, (metric,)))
