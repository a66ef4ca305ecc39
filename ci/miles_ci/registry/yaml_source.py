"""Strict YAML with places: the subset of YAML in which a file says what it seems to say.

Refused: duplicate keys, tabs, anchors, aliases and merge keys, tags, several documents, keys that are no
plain strings, numbers in exotic notations. `yes`/`no`/`on`/`off`, dates and octal-looking words stay
strings, so a date needs no quotes and a country code is no boolean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from miles_ci.errors import Diagnostic

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Keys = tuple[str | int, ...]


@dataclass
class Document:
    """Parsed data and, for each path of keys and indices, the place of its value and of its key."""

    path: str
    data: Any = None
    values: dict[Keys, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Keys, tuple[int, int]] = field(default_factory=dict)
    errors: list[Diagnostic] = field(default_factory=list)

    def place(self, keys: Keys, *, of_key: bool = False) -> tuple[int, int]:
        """Place of the value (or key) at `keys`; of the nearest enclosing entry when it is absent."""
        while keys:
            found = (self.keys.get(keys) if of_key else None) or self.values.get(keys) or self.keys.get(keys)
            if found is not None:
                return found
            keys = keys[:-1]
            of_key = True
        return 1, 1

    def error(self, keys: Keys, code: str, message: str, *, of_key: bool = False, severity: str = "error") -> None:
        line, column = self.place(keys, of_key=of_key)
        self.errors.append(Diagnostic(self.path, line, column, code, message, severity))


def read_document(path: str, source: bytes) -> Document:
    """Parse; every problem of form becomes an error of the document, none is raised."""
    document = Document(path)
    text = _decode(document, source)
    if text is None:
        return document
    for number, content in enumerate(text.split("\n"), 1):
        if "\t" in content:
            message = "a tab; indent and separate with spaces"
            document.errors.append(Diagnostic(path, number, content.index("\t") + 1, "tab", message))
    try:
        if not _tokens_are_plain(document, text):
            return document
        nodes = list(yaml.compose_all(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = f"not valid YAML: {error.problem or error.context or 'unreadable'}"
        document.errors.append(Diagnostic(path, line, column, "yaml-syntax", what))
        return document
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = f"not valid YAML: {type(error).__name__}: {error}".split("\n")[0][:200]
        document.errors.append(Diagnostic(path, 1, 1, "yaml-syntax", what))
        return document
    if len(nodes) != 1 or nodes[0] is None:
        what = "the file is empty" if not nodes or nodes[0] is None else "several documents; keep one"
        document.errors.append(Diagnostic(path, 1, 1, "yaml-syntax", what))
        return document
    document.data = _Builder(document).build(nodes[0], ())
    return document


def _decode(document: Document, source: bytes) -> str | None:
    if len(source) > MAX_BYTES:
        document.errors.append(Diagnostic(document.path, 1, 1, "too-large", f"larger than {MAX_BYTES} bytes"))
        return None
    try:
        return source.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = source[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        what = f"not valid UTF-8 (byte 0x{source[error.start]:02x})"
        document.errors.append(Diagnostic(document.path, line, column, "not-utf8", what))
        return None


_REFUSED = {yaml.AnchorToken: "an anchor", yaml.AliasToken: "an alias", yaml.TagToken: "a tag"}
_OPENING = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


def _tokens_are_plain(document: Document, text: str) -> bool:
    """Report anchors, aliases and tags, which leave no trace in the nodes; False when nested too deeply.

    The composer recurses, so depth is measured on the flat token stream before it runs.
    """
    depth = 0
    for token in yaml.scan(text, Loader=_LOADER):
        kind = type(token)
        mark = token.start_mark
        if kind in _REFUSED:
            message = f"{_REFUSED[kind]} is refused: it hides what an entry says; write the value out"
            document.errors.append(Diagnostic(document.path, mark.line + 1, mark.column + 1, "yaml-alias", message))
        elif kind in _OPENING:
            depth += 1
            if depth > MAX_DEPTH:
                message = f"nested deeper than {MAX_DEPTH} levels"
                document.errors.append(Diagnostic(document.path, mark.line + 1, mark.column + 1, "too-deep", message))
                return False
        elif kind in _CLOSING:
            depth -= 1
    return True


class _Builder:
    """Nodes to plain data, noting places."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._built: set[int] = set()

    def _error(self, node: yaml.Node, code: str, message: str) -> None:
        mark = node.start_mark
        self.document.errors.append(Diagnostic(self.document.path, mark.line + 1, mark.column + 1, code, message))

    def build(self, node: yaml.Node, keys: Keys) -> Any:
        mark = node.start_mark
        self.document.values[keys] = (mark.line + 1, mark.column + 1)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        # An alias yields the same node object again: its expansion could be exponential or endless.
        if id(node) in self._built:
            return None
        self._built.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*keys, index)) for index, item in enumerate(node.value)]
        return self._mapping(node, keys)

    def _mapping(self, node: yaml.Node, keys: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._error(key_node, "bad-key", "a key must be a plain string")
                continue
            name = key_node.value
            mark = key_node.start_mark
            if name == "<<":
                self._error(key_node, "yaml-alias", "a merge key is refused: it hides what an entry says")
                continue
            place = (*keys, name)
            if name in result:
                first = self.document.keys[place]
                message = f"duplicate key '{name}' (first in line {first[0]})"
                self._error(key_node, "duplicate-key", message)
                continue
            self.document.keys[place] = (mark.line + 1, mark.column + 1)
            result[name] = self.build(value_node, place)
        return result


def _scalar(node: yaml.ScalarNode) -> Any:
    """Quoted and block scalars are strings; of the plain ones only JSON's own words and numbers are not."""
    value = node.value
    if node.style:
        return value
    if value in ("true", "false"):
        return value == "true"
    if value in ("", "null", "~"):
        return None
    if _INT.fullmatch(value) and len(value) <= 19:
        return int(value)
    if _FLOAT.fullmatch(value) and len(value) <= 40:
        return float(value)
    return value
