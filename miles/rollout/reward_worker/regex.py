"""What a worker process of reward kind `regex` runs: a pattern can take exponential time, so it can be killed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def make(pattern: str, compare: bool) -> Callable[[str, str, dict[str, Any]], float]:
    """Group 1 (or the whole match) of the last match equals the answer; without `compare` any match is 1."""
    compiled = re.compile(pattern, re.DOTALL)

    def judge(completion: str, answer: str, metadata: dict[str, Any]) -> float:
        del metadata
        last = None
        for last in compiled.finditer(completion):  # noqa: B007 - the last match is what counts
            if not compare:
                break
        if last is None or not compare:
            return float(last is not None)
        text = last.group(1) if compiled.groups else last.group(0)
        return float((text or "").strip() == answer.strip())

    return judge
