"""A reward function of a user's, so that a run has worker processes for it."""

from __future__ import annotations

from typing import Any


def score(completion: str, answer: Any, metadata: dict[str, Any]) -> float:
    """The share of the answer's characters that stand where they should."""
    return sum(given == wanted for given, wanted in zip(completion, str(answer), strict=False)) / len(str(answer))
