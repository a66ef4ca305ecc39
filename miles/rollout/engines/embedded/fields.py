"""The engine's edge: reads a JSON body within bounds, so that nothing behind it meets a value it was not made for.

Every field has a type, a range or a length; what is wrong is one `BadRequest` with the field's name (HTTP 422, 413
for a body that is too large). Numbers are finite by the JSON grammar; an integer that does not fit 64 bits arrives as
a float and is refused as one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson

MAX_DEPTH = 8
CONTROL_BYTES = 64 << 10
TEXT = 256
_REQUIRED: Any = object()
_BRACKETS = b"[]{}"
_OTHERS = bytes(byte for byte in range(256) if byte not in _BRACKETS)


class BadRequest(Exception):
    """A request that is answered with `status` and changes nothing; `field` is what to correct."""

    def __init__(self, field: str, problem: str, *, status: int = 422) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.status = status


def shown(value: Any) -> str:
    """A short form of any JSON value for an error text; containers are not walked."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


async def read_body(receive: Callable[[], Awaitable[Any]], *, most: int = CONTROL_BYTES) -> bytes:
    """The request's body from an ASGI `receive`; no more than `most` bytes are ever held."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise BadRequest("body", "the connection closed before its end", status=400)
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise BadRequest("body", f"more than {most} bytes", status=413)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty object."""
    if not body.strip():
        return {}
    # Brackets inside texts count too at first: only a body that looks too deep is walked.
    deep = _depth_of_brackets(body) > MAX_DEPTH
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest("body", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("body", f"expected a JSON object, got {type(value).__name__}")
    if deep and _depth(value) > MAX_DEPTH:
        raise BadRequest("body", f"nested deeper than {MAX_DEPTH}")
    return value


class Fields:
    """Takes the fields of one object, each with its bounds; `done` refuses those that nobody took."""

    def __init__(self, value: dict[str, Any], where: str = "") -> None:
        self._value = value
        self._where = f"{where}." if where else ""
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The raw value. null counts as absent."""
        self._taken.add(name)
        value = self._value.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.bad(name, "missing")
            return default
        return value

    def bad(self, name: str, problem: str) -> BadRequest:
        return BadRequest(f"{self._where}{name}", problem)

    def text(self, name: str, default: Any = _REQUIRED, *, most: int = TEXT) -> Any:
        """1 to `most` characters, none of them NUL."""
        value = self.take(name, default)
        if value is not default and not (type(value) is str and 0 < len(value) <= most and "\0" not in value):
            raise self.bad(name, f"{shown(value)} is not a text of 1 to {most} characters without NUL")
        return value

    def choice(self, name: str, options: tuple[str, ...], default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not (type(value) is str and value in options):
            raise self.bad(name, f"{shown(value)} is not one of {', '.join(options)}")
        return value

    def integer(self, name: str, lo: int, hi: int, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not (type(value) is int and lo <= value <= hi):
            raise self.bad(name, f"{shown(value)} is not an integer from {lo} to {hi}")
        return value

    def number(self, name: str, lo: float, hi: float, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not (type(value) in (int, float) and lo <= value <= hi):
            raise self.bad(name, f"{shown(value)} is not a number from {lo:g} to {hi:g}")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and type(value) is not bool:
            raise self.bad(name, f"{shown(value)} is not true or false")
        return value

    def texts(self, name: str, default: Any = _REQUIRED, *, most: int) -> Any:
        """A list of 1 to `most` texts, as a tuple."""
        value = self.take(name, default)
        if value is default:
            return value
        good = isinstance(value, list) and 0 < len(value) <= most
        if not good or not all(type(item) is str and 0 < len(item) <= TEXT for item in value):
            raise self.bad(name, f"{shown(value)} is not a list of 1 to {most} texts of at most {TEXT} characters")
        return tuple(value)

    def items(self, name: str, default: Any = _REQUIRED, *, most: int) -> Any:
        """A list of at most `most` values of any kind."""
        value = self.take(name, default)
        if value is not default and not (isinstance(value, list) and len(value) <= most):
            raise self.bad(name, f"{shown(value)} is not a list of at most {most}")
        return value

    def object(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not isinstance(value, dict):
            raise self.bad(name, f"{shown(value)} is not an object")
        return value

    def version(self, name: str) -> int:
        """A weight version: the decimal text of an int64 >= 0."""
        value = self.take(name)
        good = type(value) is str and 0 < len(value) <= 19 and value.isascii() and value.isdigit()
        if not good or int(value) >= 1 << 63 or str(int(value)) != value:
            raise self.bad(name, f"{shown(value)} is not the decimal text of an int64 >= 0")
        return int(value)

    def done(self) -> None:
        unknown = sorted(set(self._value) - self._taken)
        if unknown:
            raise self.bad(unknown[0][:TEXT], "unsupported option; remove it")


def _depth_of_brackets(body: bytes) -> int:
    depth = deepest = 0
    for byte in body.translate(None, _OTHERS):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        else:
            depth -= 1
    return deepest


def _depth(value: Any) -> int:
    """Depth of nested containers, at most MAX_DEPTH + 1."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [child for item in level for child in _children(item) if isinstance(child, list | dict)]
    return depth


def _children(item: Any) -> Iterator[Any]:
    yield from item.values() if isinstance(item, dict) else item
