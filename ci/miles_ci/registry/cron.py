"""Five-field crons, numbers only, as GitHub accepts them: whether one can be read and ever fires."""

from __future__ import annotations

import re

_RANGES = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6))
_PART = re.compile(r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/(\d{1,2}))?")
# February has 29 days often enough.
_DAYS = dict.fromkeys((1, 3, 5, 7, 8, 10, 12), 31) | dict.fromkeys((4, 6, 9, 11), 30) | {2: 29}


def cron_problem(cron: str) -> str | None:
    """Why a cron is wrong, or None."""
    values: dict[str, set[int]] = {}
    for (field, low, high), text in zip(_RANGES, cron.split(" "), strict=True):
        values[field] = set()
        for part in text.split(","):
            match = _PART.fullmatch(part)
            if match is None:
                return f"cannot read the {field} '{part}'"
            first, last, step = (int(group) if group else None for group in match.groups())
            numbers = [number for number in (first, last) if number is not None]
            if any(not low <= number <= high for number in numbers) or step == 0:
                return f"{field} '{part}' is outside {low}-{high}"
            if len(numbers) == 2 and numbers[0] > numbers[1]:
                return f"{field} range '{part}' runs backwards"
            start = low if first is None else first
            # `5/10` counts on from 5, `5` is only 5.
            end = last if last is not None else high if first is None or step is not None else first
            values[field].update(range(start, end + 1, step or 1))
    day, month, weekday = cron.split(" ")[2:]
    # With a weekday of its own a cron fires on that one too.
    if weekday.startswith("*") and min(values["day"]) > max(_DAYS[number] for number in values["month"]):
        return f"never fires: no month '{month}' has a day '{day}'"
    return None
