"""What no file, message or tracker may get: values of variables that hold keys, and passwords in addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"(^|[._])(api_?key|access_?key|passw(or)?d|secret|token|credentials?)$", re.IGNORECASE)
_USER_IN_ADDRESS = re.compile(r"://[^/@\s]+@")
# A shorter value is part of too many words.
MIN_CHARS = 6
LEFT_OUT = "[left out]"


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """`text` without values of `environ` whose names speak of keys, and without users and passwords of addresses."""
    values = {value for name, value in environ.items() if _SECRET.search(name) and len(value) >= MIN_CHARS}
    # Longest first: one may be part of another.
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, LEFT_OUT)
    return _USER_IN_ADDRESS.sub(f"://{LEFT_OUT}@", text)


def public_settings(settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Without leaves whose names speak of keys, and with texts cleaned."""
    return {
        key: without_secrets(value, environ) if isinstance(value, str) else value
        for key, value in settings.items()
        if not _SECRET.search(key)
    }
