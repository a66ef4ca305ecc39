"""Rules for the lists of the registry: nothing twice, and no glob that can match nothing."""

from __future__ import annotations

from typing import Any

from miles_ci.registry.patterns import glob_fault
from miles_ci.registry.yaml_source import Document, Keys


def check_globs(document: Document, entries: dict[str, dict[str, Any]]) -> None:
    """A glob that can match nothing would be a rule that never applies."""
    selection = document.data.get("selection") if isinstance(document.data, dict) else None
    found: list[tuple[Keys, object]] = []
    if isinstance(selection, dict):
        edges, inert = selection.get("edges"), selection.get("inert")
        for index, edge in enumerate(edges if isinstance(edges, list) else ()):
            if isinstance(edge, dict):
                found += [(("selection", "edges", index, field), edge.get(field)) for field in ("when", "tests")]
        found += [(("selection", "inert", i), glob) for i, glob in enumerate(inert if isinstance(inert, list) else ())]
    for name, image in entries["images"].items():
        found += [(("images", name, "key_files", index), glob) for index, glob in enumerate(image.key_files)]
    for keys, glob in found:
        fault = glob_fault(glob) if isinstance(glob, str) else None
        if fault is not None:
            document.error(keys, "bad-glob", f"{'.'.join(map(str, keys))}: {glob!r:.60}: {fault}")


def check_repetitions(document: Document, entries: dict[str, dict[str, Any]]) -> None:
    """Every list of the registry is a set with an order. Crons have a rule of their own, across cadences."""
    waiting: list[tuple[Keys, Any]] = [((), document.data)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*keys, name), item) for name, item in value.items() if name != "crons"]
        elif isinstance(value, list):
            seen: list[Any] = []
            for index, item in enumerate(value):
                if item in seen:
                    shown = f"'{item}'" if isinstance(item, str) else "the same entry"
                    message = f"{'.'.join(map(str, keys))}: {shown} is listed twice"
                    document.error((*keys, index), "duplicate-name", message)
                seen.append(item)
