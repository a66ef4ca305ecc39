"""What a worker process of reward kind `python` runs: the user's own function, imported once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.config import user_code

OPTION = "rollout.reward.options.path"
PARAMETERS = ("completion", "answer", "metadata")


def make(path: str) -> Callable[[str, Any, dict[str, Any]], Any]:
    return user_code.load(path, option=OPTION, parameters=PARAMETERS)
