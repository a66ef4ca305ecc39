"""A short name for "the same failure again": stable over runs, machines, seeds, addresses and paths."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_MASKS = (
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b"), "<hex>"),
    (re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:/[\w.+@=,%-]+)+/?"), "<path>"),
    (re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,}\b"), "<hex>"),
    (re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"), "<n>"),
)


@dataclass(frozen=True)
class Frame:
    """One level of a traceback; `file` relative to the repository, or absolute when outside it."""

    file: str
    function: str
    line: int

    @property
    def in_repository(self) -> bool:
        return not self.file.startswith("/") and "site-packages" not in self.file


def strip_ansi(text: str) -> str:
    return ANSI.sub("", text)


def mask(message: str) -> str:
    """The message without what changes from run to run: uuids, hex numbers, paths, numbers."""
    masked = strip_ansi(message)
    for pattern, name in _MASKS:
        masked = pattern.sub(name, masked)
    return " ".join(masked.split())


def signature(kind: str, message: str, frames: Sequence[Frame]) -> str:
    """First 16 hex digits of sha256(type, masked message, deepest frame inside the repository)."""
    inside = [frame for frame in frames if frame.in_repository]
    place = f"{inside[-1].file}:{inside[-1].function}" if inside else ""
    return hashlib.sha256("\0".join((kind, mask(message), place)).encode()).hexdigest()[:16]
