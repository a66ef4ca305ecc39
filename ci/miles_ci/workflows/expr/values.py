"""Values of the expression language and their coercions.

A value is `None`, `bool`, `float`, `str`, `list` or `dict` (integers become floats on entry). `Filtered` marks a
list made by `.*`, whose next index applies to its items. Comparison follows GitHub's documented rules: unlike
kinds are compared as numbers, strings ignore case, lists and objects are equal only to themselves.
"""

from __future__ import annotations

import json
import math
import re
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|Infinity)")
_RADIX = re.compile(r"0([xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")
# What ECMAScript's Number() strips from a string before it reads it.
_SPACE = " \t\n\r\v\f\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


class Filtered(list[Any]):
    """The result of `.*`: an index applied to it is applied to each item."""


def normalise(value: Any) -> Any:
    """Convert JSON-like Python data to expression values; a key that repeats another in other case is dropped."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, list | tuple):
        return [normalise(item) for item in value]
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        seen: set[str] = set()
        for key, item in value.items():
            if str(key).lower() not in seen:
                seen.add(str(key).lower())
                out[str(key)] = normalise(item)
        return out
    raise TypeError(f"no expression value for {type(value).__name__}")


def parse_number(text: str) -> float:
    """Read a string as ECMAScript's Number() does: empty is 0, anything unreadable is NaN."""
    text = text.strip(_SPACE)
    if not text:
        return 0.0
    if _RADIX.fullmatch(text):
        return float(int(text, 0))
    if _DECIMAL.fullmatch(text):
        return float(text)
    return math.nan


def to_number(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool):
        return 1.0 if value else 0.0
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        return parse_number(value)
    return math.nan


def to_text(value: Any) -> str:
    """The string an expression value becomes in a template or in `format`."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return _number_text(value)
    return "Array" if isinstance(value, list) else "Object"


def _number_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if abs(value) < 1e21:  # limited to 15 decimals
        rounded = Decimal(abs(value)).quantize(Decimal("1e-15"), rounding=ROUND_HALF_UP)
        value = math.copysign(float(rounded), value)
    return _shortest(value)


def _shortest(value: float) -> str:
    """Shortest digits that round-trip, in ECMAScript's layout (exponent below 1e-6 and from 1e21)."""
    if value == 0:
        return "0"
    _, digits, exponent = Decimal(repr(abs(value))).normalize().as_tuple()
    text = "".join(map(str, digits))
    point = len(text) + int(exponent)
    prefix = "-" if value < 0 else ""
    if len(text) <= point <= 21:
        return prefix + text + "0" * (point - len(text))
    if 0 < point <= 21:
        return f"{prefix}{text[:point]}.{text[point:]}"
    if -6 < point <= 0:
        return f"{prefix}0.{'0' * -point}{text}"
    mantissa = text[0] + ("." + text[1:] if len(text) > 1 else "")
    return f"{prefix}{mantissa}e{'+' if point > 0 else '-'}{abs(point - 1)}"


def is_truthy(value: Any) -> bool:
    if isinstance(value, list | dict):
        return True
    if isinstance(value, float):
        return value != 0 and not math.isnan(value)
    return bool(value)


def is_primitive(value: Any) -> bool:
    return not isinstance(value, list | dict)


def fold(text: str) -> str:
    """Upper case for comparison; the dotless i keeps its own identity."""
    return "ı".join(part.upper() for part in text.split("ı"))


def _coerce(left: Any, right: Any) -> tuple[Any, Any]:
    kinds = {_kind(left), _kind(right)}
    if len(kinds) == 1 or kinds & {"array", "object"}:
        # A list or object beside null or a boolean still turns that one into a number; neither can be equal.
        return left, right
    return to_number(left), to_number(right)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def equals(left: Any, right: Any) -> bool:
    left, right = _coerce(left, right)
    kind = _kind(left)
    if kind != _kind(right):
        return False
    if kind in ("array", "object"):
        return left is right
    if kind == "string":
        return fold(left) == fold(right)
    return bool(left == right)


def greater(left: Any, right: Any) -> bool:
    left, right = _coerce(left, right)
    kind = _kind(left)
    if kind != _kind(right) or kind in ("array", "object", "null"):
        return False
    if kind == "string":
        return fold(left).encode("utf-16-be", "surrogatepass") > fold(right).encode("utf-16-be", "surrogatepass")
    return bool(left > right)


def parse_json(text: str) -> Any:
    """Strict JSON to values; `ValueError` on empty text, NaN and Infinity literals or trailing text."""
    if not text.strip():
        raise ValueError("empty input")

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    return normalise(json.loads(text, parse_constant=refuse))


def dump_json(value: Any, indent: str = "") -> str:
    """Pretty JSON, two spaces, numbers in ECMAScript's layout; NaN and infinities become null."""
    inner = indent + "  "
    if isinstance(value, float) and not isinstance(value, bool):
        return _shortest(value) if math.isfinite(value) else "null"
    if isinstance(value, list):
        if not value:
            return "[]"
        return "[\n" + ",\n".join(inner + dump_json(item, inner) for item in value) + f"\n{indent}]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        rows = (
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {dump_json(item, inner)}" for key, item in value.items()
        )
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return json.dumps(value, ensure_ascii=False)
