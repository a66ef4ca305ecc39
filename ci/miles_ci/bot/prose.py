"""Which lines of a comment or description are prose: what a reader sees as text at column 0.

Left out: fenced code (``` or ~~~, closed by a fence of the same kind and at least the same length, else open to
the end), indented code, block quotes with their lazy continuation lines, and HTML comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_BODY = 65_536
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_INLINE_CODE = re.compile(r"(`+)(?:(?!\1).)+?\1(?!`)")


@dataclass(frozen=True)
class Line:
    """A prose line; `number` counts from 1 in the body."""

    number: int
    text: str


def normalise(body: str | None) -> str:
    """CRLF and CR become LF; a null body is empty."""
    return (body or "").replace("\r\n", "\n").replace("\r", "\n")


def prose_lines(body: str | None) -> list[Line]:
    """Prose lines in order. Bodies longer than GitHub allows are cut there, so nothing beyond is ever read."""
    out: list[Line] = []
    fence = ""
    quoted = commented = False
    for number, text in enumerate(normalise(body)[:MAX_BODY].split("\n"), 1):
        if commented:
            commented = "-->" not in text
            continue
        found = _FENCE.fullmatch(text)
        if fence:
            if found and found[1][0] == fence[0] and len(found[1]) >= len(fence) and not found[2].strip():
                fence = ""
            continue
        if found and not (found[1][0] == "`" and "`" in found[2]):
            fence, quoted = found[1], False
            continue
        if not text.strip():
            quoted = False
            continue
        if re.match(r" {0,3}>", text):
            quoted = True
            continue
        visible = _INLINE_CODE.sub("", text)
        if "<!--" in visible:
            commented = _opens_comment(visible)
            if visible.lstrip().startswith("<!--"):
                continue
        if quoted or text.startswith(("    ", "\t")):
            continue
        out.append(Line(number, text))
    return out


def _opens_comment(text: str) -> bool:
    """Whether the last HTML comment that begins on this line is still open at its end."""
    at = 0
    while (start := text.find("<!--", at)) >= 0:
        end = text.find("-->", start + 4)
        if end < 0:
            return True
        at = end + 3
    return False
