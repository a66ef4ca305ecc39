"""What a Markdown page names: code fences with their commands, code spans, links, headings."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
SHELLS = {"bash", "sh", "console", "shell"}
FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*([\w-]*)")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Fence:
    """A code block: its language, the number of its first line, and its lines."""

    language: str
    line: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A page cut into prose lines (number, text) and fences."""

    path: Path
    prose: tuple[tuple[int, str], ...]
    fences: tuple[Fence, ...]

    def place(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path}:{line}"

    def spans(self) -> list[tuple[int, str]]:
        return [(line, found) for line, text in self.prose for found in SPAN.findall(text)]

    def links(self) -> list[tuple[int, str]]:
        return [(line, found) for line, text in self.prose for found in LINK.findall(SPAN.sub("", text))]

    def anchors(self) -> set[str]:
        """Anchors of the headings, as GitHub makes them."""
        titles = [text.lstrip("#").strip() for _, text in self.prose if re.match(r"#{1,6} ", text)]
        plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        seen: dict[str, int] = {}
        anchors = set()
        for title in plain:
            count = seen.get(title, 0)
            anchors.add(f"{title}-{count}" if count else title)
            seen[title] = count + 1
        return anchors

    def commands(self) -> list[tuple[int, list[str]]]:
        """Words of each command line in shell fences; continuation lines are joined, comments left out."""
        return [found for fence in self.fences if fence.language in SHELLS for found in _commands(fence)]


def read_page(path: Path) -> Page:
    prose: list[tuple[int, str]] = []
    fences: list[Fence] = []
    open_fence: tuple[str, str, int] | None = None
    held: list[str] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        # A fence may stand in a quote or a list item.
        bare = re.sub(r"^(\s*>)+ ?", "", text)
        match = FENCE.match(bare)
        if open_fence is None and match:
            open_fence, held = (match[2], match[3], number + 1), []
        elif open_fence is not None and match and match[2].startswith(open_fence[0]) and not match[3]:
            fences.append(Fence(open_fence[1], open_fence[2], tuple(held)))
            open_fence = None
        elif open_fence is not None:
            held.append(bare)
        else:
            prose.append((number, bare))
    assert open_fence is None, f"{path}: the code block at line {open_fence[2] - 1} is not closed"
    return Page(path, tuple(prose), tuple(fences))


def _commands(fence: Fence) -> list[tuple[int, list[str]]]:
    found, start, joined = [], fence.line, ""
    for number, text in enumerate(fence.lines, start=fence.line):
        if not joined:
            start = number
        joined += text.strip().removeprefix("$ ")
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        words = shlex.split(joined, comments=True)
        # Several commands on one line; NAME=value before a command is its environment.
        for _, part in itertools.groupby(words, key=lambda word: word in ("&&", "||", ";", "|")):
            command = list(part)
            while command and re.match(r"[A-Z_][A-Z0-9_]*=", command[0]):
                command.pop(0)
            if command and command[0] not in ("&&", "||", ";", "|"):
                found.append((start, command))
        joined = ""
    return found


def expand(text: str) -> list[str]:
    """`a.{b, c}` as `a.b`, `a.c`; also for paths."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    parts = [part.strip() for part in match[1].split(",")]
    return [full for part in parts for full in expand(text[: match.start()] + part + text[match.end() :])]


def all_pages() -> list[Path]:
    """Every page of the repository."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docker").rglob("*.md")])
