"""Text of strangers inside Markdown: nothing of it becomes markup, a mention, a link or a table cell border."""

from __future__ import annotations

import re

JOINER = "\u2060"
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~$:@-])")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def one_line(text: str, limit: int = 200) -> str:
    """Control characters and bidirectional marks removed, white space collapsed, cut with an ellipsis."""
    flat = " ".join(_CONTROL.sub(" ", text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def markdown(text: str, limit: int = 200) -> str:
    """Plain text for GitHub Markdown, also inside a table cell.

    Escapes do not stop GitHub's own links (#12, @team, bare addresses): a word joiner breaks those.
    """
    flat = one_line(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = _MARKUP.sub(r"\\\1", flat)
    for sign in ("\\@", "\\#"):
        flat = flat.replace(sign, sign[1] + JOINER)
    return flat.replace("\\:", f":{JOINER}")


def code(text: str, limit: int = 200) -> str:
    """A code span that its content cannot leave, also inside a table cell."""
    flat = one_line(text, limit).replace("|", "¦")
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat or ' '}{pad}{fence}"
