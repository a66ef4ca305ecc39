"""JSON from outside: duplicate keys, NaN, infinities and excessive depth are refused, unpaired surrogates spelled out."""

from __future__ import annotations

import json
from typing import Any

from miles_ci.errors import UsageError
from miles_ci.valid_text import valid_text


class StrictJsonError(UsageError):
    """The text is not the JSON we accept."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in ((valid_text(key), value) for key, value in pairs):
        if key in out:
            raise StrictJsonError(f"JSON: duplicate key {key!r}")
        out[key] = value
    return out


def _constant(word: str) -> Any:
    raise StrictJsonError(f"JSON: {word} is not a number")


def loads(text: str | bytes, *, what: str = "JSON") -> Any:
    """Parse strictly; `StrictJsonError` names `what`."""
    try:
        return valid_text(json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant))
    except StrictJsonError as error:
        raise StrictJsonError(f"{what}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise StrictJsonError(f"{what}: {error}") from error
