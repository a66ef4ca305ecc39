"""JSON from outside: whatever is wrong with the text is one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles.config.errors import ConfigError


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, whose every failure is a `json.JSONDecodeError`.

    Nesting that is too deep raises `RecursionError` in the standard library, a number of more than 4,300 digits and
    bytes that are no text a bare `ValueError`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None


def read_object(path: Path, *, option: str, remedy: str) -> dict[str, Any]:
    """The JSON object that a file holds; `ConfigError` with `option`, the path and `remedy` otherwise."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}; {remedy}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {path} holds no JSON object; {remedy}")
    return value
