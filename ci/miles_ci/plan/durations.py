"""Learned durations: what was observed, the committed table (`tests/durations.json`), and estimates from it.

Everything is in integer milliseconds. A duration belongs to (path, suite, hardware model); only passing
runs count. The table is sorted with one line for each test, so that a diff shows what changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from miles_ci.errors import UsageError
from miles_ci.files import write_whole

TABLE = "durations.json"
WINDOW = 20
MAX_AGE_DAYS = 30
MIN_OBSERVATIONS = 3

Key = tuple[str, str, str]
"""(path, suite, hardware model)"""


@dataclass(frozen=True, slots=True)
class Observation:
    """One passing run of a test file, or of one item in it (`item` is the node id)."""

    path: str
    suite: str
    hardware: str
    ms: int
    finished_at: float
    item: str | None = None


@dataclass(frozen=True, slots=True)
class Learned:
    """The median of the last observations. `items`: node id -> median, None for an item never seen to pass."""

    ms: int
    count: int
    last: str
    items: Mapping[str, int | None] = field(default_factory=dict)


def median_ms(values: Iterable[int]) -> int:
    """The median, at least 1; of an even count the lower middle, so that it is an observed value."""
    ordered = sorted(values)
    return max(1, ordered[(len(ordered) - 1) // 2])


def learn(observations: Iterable[Observation], now: float) -> dict[Key, Learned]:
    """Medians of the last 20 observations no older than 30 days, for files and items."""
    files: dict[Key, list[Observation]] = {}
    items: dict[Key, dict[str, list[Observation]]] = {}
    oldest = now - MAX_AGE_DAYS * 86_400
    for seen in observations:
        if not oldest <= seen.finished_at <= now + 86_400 or seen.ms < 0:
            continue
        key = (seen.path, seen.suite, seen.hardware)
        if seen.item is None:
            files.setdefault(key, []).append(seen)
        else:
            items.setdefault(key, {}).setdefault(seen.item, []).append(seen)
    learned: dict[Key, Learned] = {}
    for key, seen_list in files.items():
        recent = sorted(seen_list, key=lambda seen: (seen.finished_at, seen.ms))[-WINDOW:]
        last = datetime.fromtimestamp(recent[-1].finished_at, timezone.utc).date().isoformat()
        medians: dict[str, int | None] = {
            name: median_ms(seen.ms for seen in sorted(group, key=lambda seen: seen.finished_at)[-WINDOW:])
            for name, group in items.get(key, {}).items()
        }
        learned[key] = Learned(median_ms(seen.ms for seen in recent), len(recent), last, medians)
    return learned


class Durations:
    """The table, by (path, suite, hardware)."""

    def __init__(self, entries: Mapping[Key, Learned] | None = None) -> None:
        self.entries: dict[Key, Learned] = dict(entries or {})
        self._paths = {
            (path, suite) for (path, suite, _), item in self.entries.items() if item.count >= MIN_OBSERVATIONS
        }

    def get(self, path: str, suite: str, hardware: str) -> Learned | None:
        """What is known, if there are enough observations to rely on."""
        found = self.entries.get((path, suite, hardware))
        return found if found is not None and found.count >= MIN_OBSERVATIONS else None

    def knows(self, path: str, suite: str) -> bool:
        """Whether the test has enough observations on any hardware of the suite."""
        return (path, suite) in self._paths

    @classmethod
    def load(cls, path: Path) -> Durations:
        """Read the table. A missing file is an empty table; a corrupt one raises `UsageError`."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from error
        try:
            data = json.loads(text, object_pairs_hook=_unique)
            return cls(_parse(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            message = f"{path}: no valid durations table ({error}); restore it from git or run `miles-ci tune`"
            raise UsageError(message) from error

    def text(self) -> str:
        """The committed form: sorted, one line for each test."""
        lines = []
        for (path, suite, hardware), item in sorted(self.entries.items()):
            record: dict[str, Any] = {"ms": item.ms, "n": item.count, "last": item.last}
            if item.items:
                record["items"] = dict(sorted(item.items.items()))
            name = json.dumps(f"{path}|{suite}|{hardware}", ensure_ascii=False)
            lines.append(f"{name}: {json.dumps(record, ensure_ascii=False)}")
        body = ",\n".join(lines)
        return '{"schema": 1, "tests": {\n' + body + ("\n" if body else "") + "}}\n"

    def save(self, path: Path) -> None:
        """Write atomically."""
        write_whole(path, self.text().encode())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object names a key twice")
    return result


def _parse(data: Any) -> dict[Key, Learned]:
    if not isinstance(data, dict) or data.get("schema") != 1 or set(data) != {"schema", "tests"}:
        raise ValueError("expected {schema: 1, tests: {…}}")
    entries: dict[Key, Learned] = {}
    for name, record in data["tests"].items():
        parts = name.split("|")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"'{name}' is not path|suite|hardware")
        items = record.get("items", {})
        numbers = [record["ms"], record["n"], *(value for value in items.values() if value is not None)]
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in numbers):
            raise ValueError(f"'{name}': durations and counts are integers >= 0")
        if set(record) - {"ms", "n", "last", "items"} or not isinstance(record["last"], str):
            raise ValueError(f"'{name}': expected ms, n, last and perhaps items")
        entries[(parts[0], parts[1], parts[2])] = Learned(max(1, record["ms"]), record["n"], record["last"], items)
    return entries
