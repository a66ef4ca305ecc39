"""Patterns of the registry that would be accepted and then not do what was meant: regular expressions whose search time
cannot be bounded, and path globs with letters that mean nothing here."""

from __future__ import annotations

import importlib
import sys
from typing import Any

# Up to here a repetition of something variable multiplies the work by a constant that a log can bear.
FEW = 10
# The standard library's own parser, by the name that this Python gives it.
_PARSER = "re._parser" if sys.version_info >= (3, 11) else "sre_parse"


def slow_pattern(pattern: str) -> str | None:
    """The fault of a valid regular expression whose time can grow exponentially with the text, or None.

    Such a one repeats, without a small bound, something that can itself match the same text in several ways: another
    variable repetition, or alternatives. Stricter than needed (`(?:a+,)*` is harmless): a log of any size meets it.
    """
    tree = importlib.import_module(_PARSER).parse(pattern)
    try:
        return "a repetition inside a repetition" if _ambiguous(tree, repeated=False) else None
    except RecursionError:
        return "deep nesting"


def _ambiguous(node: Any, *, repeated: bool) -> bool:
    """Walk the parser's tree: (operation, argument) pairs in sequences, tuples and lists of any depth."""
    if isinstance(node, tuple) and len(node) == 2 and hasattr(node[0], "name"):
        operation, argument = node[0].name, node[1]
        if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, body = argument
            if repeated and least != most:
                return True
            return _ambiguous(body, repeated=repeated or int(most) > FEW)
        if operation == "BRANCH" and repeated:
            return True
        return _ambiguous(argument, repeated=repeated)
    if isinstance(node, str | int) or node is None:
        return False
    return any(_ambiguous(child, repeated=repeated) for child in node)


def glob_fault(glob: str) -> str | None:
    """What is wrong with a path glob (see `miles_ci.select.globs`), or None."""
    for letter in glob:
        if letter in "[]{}":
            return f"'{letter}' has no meaning in a path glob; only *, ** and ? have: use one of them, or one entry for each name"
        if not letter.isprintable():
            return f"{letter!r} in a path glob is not visible; remove it"
    return None
