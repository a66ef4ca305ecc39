"""What a reward function may return: one finite number, or a mapping with the key `reward` and further numbers."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

_PART_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
MOST_PARTS = 64


def reward_and_parts(value: Any) -> tuple[float, dict[str, float]]:
    """(total, parts). `TypeError` or `ValueError` says what is wrong with the value and what to return."""
    if type(value) is float and math.isfinite(value):
        return value, {}  # of thousands a step, nearly all
    if not isinstance(value, dict):
        return as_number("the reward", value), {}
    if "reward" not in value:
        raise ValueError(f"the mapping {sorted(map(str, value))} has no key 'reward'; put the total under it")
    if len(value) > MOST_PARTS:
        raise ValueError(f"{len(value)} parts, at most {MOST_PARTS}")
    for name in value:
        if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
            raise ValueError(f"{str(name)[:80]!r} names no part; use letters, digits, and _ . -")
    total = as_number("the reward", value["reward"])
    return total, {name: as_number(f"part {name}", part) for name, part in value.items() if name != "reward"}


def as_number(name: str, value: Any) -> float:
    """A finite float. True and False are 1 and 0; scalars of numpy and torch are taken, text and None are not."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} is the text {value[:80]!r}; return a number, e.g. float(...) of it")
    if not isinstance(value, numbers.Real):
        # Scalars of numpy and torch: arrays without axes.
        if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
            raise TypeError(f"{name} is of type {type(value).__name__}; return a number")
        value = value.item()
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is of type {type(value).__name__}; return a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float; reward functions return finite numbers") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; reward functions return finite numbers")
    return number
