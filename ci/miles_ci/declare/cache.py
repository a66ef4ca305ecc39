"""Results of parsing, kept by content hash and parser version; where, says `miles_ci.declare.cache_folder`.

A cache that cannot be read or written is as good as none: it holds nothing that the sources do not. Several trees share
one file, since only the content of a source counts.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from miles_ci.declare.cache_folder import KEPT_UNUSED, read_cache, write_cache
from miles_ci.declare.model import Declaration, Exemption, FileScan
from miles_ci.declare.reader import PARSER_VERSION
from miles_ci.errors import Diagnostic
from miles_ci.metric_bound import MetricBound

FILE_NAME = f"scan-{PARSER_VERSION}.json"
_DECLARATION_FIELDS = tuple(item.name for item in fields(Declaration) if item.name != "path")
_BOUND_FIELDS = tuple(item.name for item in fields(MetricBound) if item.name != "path")
_TUPLES = frozenset({"hardware", "capabilities", "labels", "est_span"})


class ScanCache:
    """Content key -> what the file declares, with the path left out (the same content may lie elsewhere)."""

    def __init__(self, entries: dict[str, Any] | None = None) -> None:
        self._entries = entries or {}
        self._used: dict[str, Any] = {}
        self._changed = False

    @classmethod
    def load(cls, folder: Path | None) -> ScanCache:
        data = read_cache(folder, FILE_NAME)
        return cls(data if isinstance(data, dict) else None)

    def get(self, key: str, path: str) -> FileScan | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            return _unpack(entry, path)
        except (TypeError, ValueError, KeyError, IndexError):
            return None

    def put(self, key: str, found: FileScan) -> None:
        self._entries[key] = _pack(found)
        self._changed = True

    def used(self, key: str) -> None:
        self._used[key] = self._entries[key]

    def save(self, folder: Path | None) -> None:
        """Write the entries of this scan, atomically, before the youngest of those that it did not use."""
        if self._changed:
            unused = ((key, entry) for key, entry in self._entries.items() if key not in self._used)
            write_cache(folder, FILE_NAME, self._used | dict(islice(unused, KEPT_UNUSED)))


def _pack(found: FileScan) -> list[Any]:
    declarations = [{name: _plain(getattr(item, name)) for name in _DECLARATION_FIELDS} for item in found.declarations]
    metric_bounds = [{name: _plain(getattr(item, name)) for name in _BOUND_FIELDS} for item in found.metric_bounds]
    errors = [[item.line, item.column, item.code, item.message, item.severity] for item in found.errors]
    return [declarations, metric_bounds, errors]


def _plain(value: Any) -> Any:
    if isinstance(value, Exemption):
        return [value.reason, value.issue, value.until]
    if isinstance(value, str | int | float | tuple | list | type(None)):
        return value
    return dict(value)


def _unpack(entry: list[Any], path: str) -> FileScan:
    declarations, metric_bounds, errors = entry
    return FileScan(
        tuple(_declaration(item, path) for item in declarations),
        tuple(
            MetricBound(
                path=path,
                **{**item, "steps": item["steps"] if isinstance(item["steps"], str) else tuple(item["steps"])},
            )
            for item in metric_bounds
        ),
        tuple(Diagnostic(path, *item) for item in errors),
    )


def _declaration(item: dict[str, Any], path: str) -> Declaration:
    values = dict(item)
    for name in _TUPLES:
        if values[name] is not None:
            values[name] = tuple(values[name])
    values["allow_never_executed"] = tuple((item, reason) for item, reason in values["allow_never_executed"])
    for name in ("disabled", "unstable"):
        if values[name] is not None:
            values[name] = Exemption(*values[name])
    values["places"] = {name: (place[0], place[1]) for name, place in values["places"].items()}
    return Declaration(path=path, **values)
