"""Options of a reward kind: their types and defaults, and errors that name them."""

from __future__ import annotations

from typing import Any

from miles.config import ConfigError

_MEANING: dict[type | tuple[type, ...], str] = {str: "text", bool: "true or false", (int, float): "a number"}


def read_options(kind: str, given: dict[str, Any], **known: tuple[type | tuple[type, ...], Any]) -> dict[str, Any]:
    """Options with defaults. `known`: name -> (type, default)."""
    unknown = given.keys() - known.keys()
    if unknown:
        raise ConfigError(
            f"rollout.reward.options: {kind} does not know {', '.join(sorted(unknown))}; "
            + (f"use {', '.join(sorted(known))}" if known else "it takes no options, remove them")
        )
    values = {}
    for name, (kinds, default) in known.items():
        value = given.get(name, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            wanted = _MEANING[kinds]
            if name not in given:
                raise ConfigError(
                    f"rollout.reward.options.{name} is missing, and reward kind {kind} needs it; set it to {wanted}"
                )
            raise ConfigError(f"rollout.reward.options.{name}: {str(value)[:80]!r} is not {wanted}; write {wanted}")
        values[name] = value
    return values
