"""The rules of each field of a declaration that need no fleet: type, range, form.

A checker takes the literal value and returns it in the form `Declaration` keeps, or raises `FieldError`
with a sentence fragment that follows "<field>: ". Bool is not an int; numbers must be finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date
from typing import Any

from miles_ci.declare.model import Exemption
from miles_ci.errors import suggestion

MIN_REASON = 15
_ISSUE = re.compile(r"#[1-9][0-9]{0,8}|https://[^\s]{4,500}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class FieldError(Exception):
    """The value of one field breaks its rule. `code` is the diagnostic's code."""

    def __init__(self, message: str, code: str = "bad-value") -> None:
        super().__init__(message)
        self.code = code


def shown(value: Any) -> str:
    """A short repr for messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(f"must be a number, got {shown(value)}", "wrong-type")
    if isinstance(value, int) and abs(value) > 10**15:
        raise FieldError(f"is out of range: {shown(value)}", "out-of-range")
    if not math.isfinite(value):
        raise FieldError(f"must be finite, got {shown(value)}", "out-of-range")
    return float(value)


def positive_number(value: Any) -> float:
    number = _number(value)
    if number <= 0:
        raise FieldError(f"must be greater than 0, got {shown(value)}", "out-of-range")
    return number


def bound(value: Any) -> float:
    number = _number(value)
    if number < 0:
        raise FieldError(f"must be 0 or greater, got {shown(value)}", "out-of-range")
    return number


def positive_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(f"must be an integer, got {shown(value)}", "wrong-type")
    if not 1 <= value <= 1024:
        raise FieldError(f"must be between 1 and 1024, got {shown(value)}", "out-of-range")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(f"must be True or False, got {shown(value)}", "wrong-type")
    return value


def name(value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(f"must be a string, got {shown(value)}", "wrong-type")
    if not _NAME.fullmatch(value):
        raise FieldError(f"is no valid name: {shown(value)} (letters, digits, '_', '.', '-')", "bad-value")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(f"must be a string, got {shown(value)}", "wrong-type")
    if not value.strip() or len(value) > 200 or any(ord(character) < 32 for character in value):
        raise FieldError("must be one line of 1 to 200 characters", "bad-value")
    return value


def names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise FieldError(f"must be a list of strings, got {shown(value)}", "wrong-type")
    result = tuple(name(item) for item in value)
    for item in result:
        if result.count(item) > 1:
            raise FieldError(f"names '{item}' twice", "duplicate-name")
    return result


def names_required(value: Any) -> tuple[str, ...]:
    result = names(value)
    if not result:
        raise FieldError("must not be empty; name at least one model or architecture", "empty-list")
    return result


def _mapping(value: Any, keys: tuple[str, ...]) -> dict[str, str]:
    if not isinstance(value, dict):
        raise FieldError(f"must be a dict with {', '.join(keys)}, got {shown(value)}", "bad-exemption")
    for key in value:
        if key not in keys:
            raise FieldError(f"has the unknown key {shown(key)}{suggestion(str(key), keys)}", "bad-exemption")
    missing = [key for key in keys if key not in value]
    if missing:
        raise FieldError(f"lacks {', '.join(missing)}", "bad-exemption")
    for key, item in value.items():
        if not isinstance(item, str):
            raise FieldError(f"{key} must be a string, got {shown(item)}", "bad-exemption")
    if len(value["reason"].strip()) < MIN_REASON:
        raise FieldError(f"reason needs at least {MIN_REASON} characters that explain it", "bad-exemption")
    return value


def exemption(value: Any) -> Exemption:
    given = _mapping(value, ("reason", "issue", "until"))
    if not _ISSUE.fullmatch(given["issue"]):
        raise FieldError(f"issue must be '#N' or an https URL, got {shown(given['issue'])}", "bad-exemption")
    if not is_iso_date(given["until"]):
        raise FieldError(f"until must be a date YYYY-MM-DD, got {shown(given['until'])}", "bad-exemption")
    return Exemption(reason=given["reason"], issue=given["issue"], until=given["until"])


def reason_only(value: Any) -> str:
    return _mapping(value, ("reason",))["reason"]


def items_with_reasons(value: Any) -> tuple[tuple[str, str], ...]:
    """`{"test_a[slow]": "why it need not run"}` as sorted pairs."""
    if not isinstance(value, dict) or not value:
        raise FieldError(f"must be a dict from item to reason, got {shown(value)}", "bad-exemption")
    for item, reason in value.items():
        text(item)
        if "::" in item and item.partition("::")[0].endswith(".py"):
            raise FieldError(f"{shown(item)}: name the item without the file", "bad-exemption")
        if not isinstance(reason, str) or len(text(reason).strip()) < MIN_REASON:
            message = f"{shown(item)}: the reason needs at least {MIN_REASON} characters that explain it"
            raise FieldError(message, "bad-exemption")
    return tuple(sorted(value.items()))


def is_iso_date(value: str) -> bool:
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        return False
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True


def bound_steps(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if value not in ("last", "all"):
            raise FieldError(f"must be 'last', 'all' or a list of steps, got {shown(value)}", "bad-value")
        return value
    if not isinstance(value, list | tuple) or not value:
        raise FieldError(f"must be 'last', 'all' or a non-empty list of steps, got {shown(value)}", "wrong-type")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise FieldError(f"steps must be integers >= 0, got {shown(item)}", "wrong-type")
    if len(set(value)) != len(value):
        raise FieldError("names a step twice", "duplicate-name")
    return tuple(value)


Checker = Callable[[Any], Any]

_EVERYWHERE: dict[str, Checker] = {
    "est_time": positive_number,
    "suite": name,
    "labels": names,
    "nightly": boolean,
    "disabled": exemption,
    "unstable": exemption,
    "timeout": positive_number,
    "split": boolean,
    "serial": boolean,
    "allow_all_skipped": reason_only,
    "allow_never_executed": items_with_reasons,
    "owner": text,
}
_GPU: dict[str, Checker] = {
    "hardware": names_required,
    "num_gpus": positive_int,
    "min_memory_gib": positive_number,
    "capabilities": names,
}

CPU_FIELDS: dict[str, Checker] = _EVERYWHERE
GPU_FIELDS: dict[str, Checker] = {**_EVERYWHERE, **_GPU}
GPU_ONLY = tuple(_GPU)
BOUND_FIELDS: dict[str, Checker] = {
    "metric": text,
    "steps": bound_steps,
    "magnitude": boolean,
    "rel_up": bound,
    "abs_up": bound,
    "rel_down": bound,
    "abs_down": bound,
    "limit": positive_number,
    "warmup": positive_int,
}

# Where None is written out it means "not given", as in the signature.
NONE_ALLOWED = frozenset(
    {
        "est_time",
        "num_gpus",
        "min_memory_gib",
        "disabled",
        "unstable",
        "timeout",
        "allow_all_skipped",
        "allow_never_executed",
        "owner",
    }
    | {"rel_up", "abs_up", "rel_down", "abs_down", "limit"}
)
