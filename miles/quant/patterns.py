"""Patterns from recipes and checkpoints: only those whose matching cannot take exponential time are compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_LENGTH = 200
# Each open repeat multiplies the work by the length of a name.
MOST_REPEATS = 3
# A repeat of more than this counts as open.
_FEW = 20
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


def compile_bounded(pattern: str) -> re.Pattern[str]:
    """`re.error` for what is no pattern, `ValueError` for one that could run away: say it without nested repeats."""
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"has {len(pattern)} characters, at most {MAX_LENGTH}; use several patterns")
    compiled = re.compile(pattern)
    repeats = [inside for code, inside in _parts(_parser.parse(pattern)) if code in _REPEATS and inside[1] > _FEW]
    if len(repeats) > MOST_REPEATS:
        raise ValueError(f"has {len(repeats)} open repeats such as .*, at most {MOST_REPEATS}; use several patterns")
    for _, _, repeated in repeats:
        if any(code in (*_REPEATS, _constants.BRANCH) for code, _ in _parts(repeated)):
            raise ValueError(
                "repeats a part that itself repeats or has alternatives; write it without the outer repeat"
            )
    return compiled


def _parts(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (code, arguments) of a parsed pattern, nested ones included."""
    for code, arguments in tree:
        yield code, arguments
        for below in _trees(arguments):
            yield from _parts(below)


def _trees(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, _parser.SubPattern):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _trees(argument)
