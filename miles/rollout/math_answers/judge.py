"""What a worker process of reward kind `math_boxed` runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from miles.rollout.math_answers.boxed import last_boxed
from miles.rollout.math_answers.compare import equal

# Deep enough for a tree of `MAX_DEPTH` levels, far from the end of the stack.
RECURSION_LIMIT = 3000


def make() -> Callable[[str, str, dict[str, Any]], float]:
    """(completion, answer, metadata) -> 1.0 where the last boxed answer equals the answer."""
    sys.setrecursionlimit(RECURSION_LIMIT)

    def judge(completion: str, answer: str, metadata: dict[str, Any]) -> float:
        del metadata
        found = last_boxed(completion)
        return 0.0 if found is None else float(equal(found, answer))

    judge.warm = _warm  # type: ignore[attr-defined]
    return judge


def _warm() -> None:
    """SymPy takes long to import and decides few answers. `simplify` imports the second part at its first call."""
    import sympy
    import sympy.physics.units  # noqa: F401
