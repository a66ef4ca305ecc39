"""JSON from outside: whatever is wrong with the text is one kind of error."""

from __future__ import annotations

import json
from typing import Any


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
