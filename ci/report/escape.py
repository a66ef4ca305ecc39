"""Text of strangers inside Markdown: nothing of it becomes markup, a mention, a link or a table cell border."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~$:@-])")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def one_line(text: str, limit: int = 200) -> str:
    """Control characters and bidirectional marks removed, white space collapsed, cut with an ellipsis."""
    flat = " ".join(_CONTROL.sub(" ", text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def markdown(text: str, limit: int = 200) -> str:
    """Plain text for GitHub Markdown, also inside a table cell."""
    return _MARKUP.sub(r"\\\1", one_line(text, limit)).replace("\\@", "@\u2060")


def code(text: str, limit: int = 200) -> str:
    """A code span that its content cannot leave, also inside a table cell."""
    flat = one_line(text, limit).replace("|", "¦")
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat or ' '}{pad}{fence}"
