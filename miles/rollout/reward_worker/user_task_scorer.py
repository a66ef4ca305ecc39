"""What a worker process of reward kind `task` runs for a task of the user's own: the class' `score`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.data.tasks.user_task import build


def make(path: str, options: dict[str, Any], seed: int) -> Callable[[str, Any, dict[str, Any]], Any]:
    return build(path, options, seed).score
