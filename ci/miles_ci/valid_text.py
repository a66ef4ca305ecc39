"""Text from outside made valid once, where it enters: JSON may name halves of surrogate pairs (`"\\ud83d"`), which
no UTF-8 file, terminal or XML document can carry. They become their visible escape, so nothing is lost."""

from __future__ import annotations

from typing import Any


def valid_text(value: Any) -> Any:
    """The same value (text, or lists, tuples and dicts of it) with every unpaired surrogate spelled out as `\\udXXX`."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list | tuple):
        return type(value)(valid_text(each) for each in value)
    if isinstance(value, dict):
        return {valid_text(key): valid_text(each) for key, each in value.items()}
    return value
