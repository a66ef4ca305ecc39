"""Nearest-name suggestions for misspelt keys, files and options."""

from __future__ import annotations

from collections.abc import Iterable

MAX_DISTANCE = 3
MAX_LISTED = 12


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance."""
    previous = list(range(len(right) + 1))
    for row, left_char in enumerate(left, start=1):
        current = [row]
        for column, right_char in enumerate(right, start=1):
            substitution = previous[column - 1] + (left_char != right_char)
            current.append(min(previous[column] + 1, current[-1] + 1, substitution))
        previous = current
    return previous[-1]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when all are further than `MAX_DISTANCE`."""
    scored = sorted((edit_distance(name, candidate), candidate) for candidate in known)
    if scored and scored[0][0] <= min(MAX_DISTANCE, max(1, len(name) - 1)):
        return scored[0][1]
    return None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Text to append to an error about an unknown `name`: the nearest, or all names when few."""
    candidates = sorted(known)
    match = nearest(name, candidates)
    if match:
        return f"did you mean '{match}'?"
    if not candidates:
        return "nothing is accepted here"
    if len(candidates) <= MAX_LISTED:
        return f"known: {', '.join(candidates)}"
    return f"{len(candidates)} names are known"
