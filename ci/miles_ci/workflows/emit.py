"""YAML text of a workflow: deterministic, LF, two spaces, plain scalars where they are safe.

Own writer instead of a dumper because pins carry comments (`Pinned`), long conditions are folded (`Folded`)
and scripts are literal blocks; `miles_ci.workflows.model.parse_yaml` reads back exactly what went in (tested).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./$][^\x00-\x1f\x7f]*")
_UNSAFE_IN_PLAIN = re.compile(r": | #|:$|[ \t]$")
_NOT_STRINGS = re.compile(
    r"(?i:y|n|yes|no|on|off|true|false|null|~|\.nan|[+-]?\.inf)|[+-]?(\d[\d_]*)?\.?\d*([eE][+-]?\d+)?|0[xo][0-9a-fA-F]+|\d{4}-\d\d-\d\d.*|[\d:]+"
)


class Pinned(str):
    """A `uses` value whose version is written as a comment."""

    version: str

    def __new__(cls, value: str, version: str) -> Pinned:
        self = super().__new__(cls, value)
        self.version = version
        return self


class Folded(str):
    """A one-line value that is broken at ` && ` and ` || ` of the outermost level into a folded block."""


def scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return json.dumps(value)
    text = str(value)
    if isinstance(value, Pinned):
        return f"{text} # {value.version}"
    if _PLAIN.fullmatch(text) and not _UNSAFE_IN_PLAIN.search(text) and not _NOT_STRINGS.fullmatch(text):
        return text
    return json.dumps(text, ensure_ascii=False)


def flow_scalar(value: Any) -> str:
    """Inside `[...]` some readers take a question mark, also the last letter of a word, for a key."""
    text = scalar(value)
    return json.dumps(text, ensure_ascii=False) if "?" in text and text == value else text


def _is_short_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(
            isinstance(item, str | int | float) and not isinstance(item, Pinned) and "\n" not in str(item)
            for item in value
        )
        and len(", ".join(scalar(item) for item in value)) <= 90
        and not any(set(scalar(item)) & set(",[]{}") and not scalar(item).startswith('"') for item in value)
    )


def fold(text: str) -> list[str]:
    """Break a condition at its outermost `&&`, else `||`; each line keeps its operator at its end."""
    lines, depth, start, quoted = [], 0, 0, False
    for at, char in enumerate(text):
        if char == "'":
            quoted = not quoted
        elif not quoted:
            depth += (char in "([") - (char in ")]")
            if depth == 0 and text.startswith((" && ", " || "), at):
                lines.append(text[start : at + 3])
                start = at + 4
    return [*lines, text[start:]]


def _entry(prefix: str, value: Any, indent: int) -> Iterator[str]:
    pad = " " * indent
    if isinstance(value, dict) and value:
        yield f"{prefix}".rstrip()
        for key, item in value.items():
            yield from _entry(f"{pad}{scalar_key(key)}: ", item, indent + 2)
    elif isinstance(value, list) and value and not _is_short_list(value):
        yield f"{prefix}".rstrip()
        for item in value:
            yield from _item(item, indent)
    elif isinstance(value, dict):
        yield f"{prefix}{{}}"
    elif isinstance(value, list):
        yield f"{prefix}[{', '.join(flow_scalar(item) for item in value)}]"
    elif isinstance(value, Folded):
        lines = fold(value)
        if len(lines) == 1 and len(value) < 100:
            yield f"{prefix}{scalar(str(value))}"
        else:
            yield f"{prefix}>-"
            yield from (f"{pad}{line}" for line in lines)
    elif isinstance(value, str) and "\n" in value:
        yield f"{prefix}|" + ("" if value.endswith("\n") else "-")
        yield from (f"{pad}{line}" if line else "" for line in value.rstrip("\n").split("\n"))
    else:
        yield f"{prefix}{scalar(value)}"


def _item(value: Any, indent: int) -> Iterator[str]:
    pad = " " * indent
    if isinstance(value, dict) and value:
        first = True
        for key, item in value.items():
            lead = f"{pad}- " if first else f"{pad}  "
            yield from _entry(f"{lead}{scalar_key(key)}: ", item, indent + 4)
            first = False
    else:
        yield from _entry(f"{pad}- ", value, indent + 2)


def scalar_key(key: str) -> str:
    """Plain where every reader sees the same string; `on` stays plain because GitHub's files are written so."""
    plain = key == "on" or (re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", key) and not _NOT_STRINGS.fullmatch(key))
    return key if plain else json.dumps(key, ensure_ascii=False)


def to_yaml(value: dict[str, Any], *, header: str = "") -> str:
    """The document with a comment header; ends with one newline."""
    lines: list[str] = [f"# {line}".rstrip() for line in header.splitlines()]
    for key, item in value.items():
        lines += _entry(f"{scalar_key(key)}: ", item, 2)
    return "\n".join(lines) + "\n"
