"""Dependency directives in a pull request's description: the only parser.

    ci-sglang-pr: #1234            refs/pull/1234/head of SGLang
    ci-megatron-pr: dev            a branch or tag, or 40 hex digits
    ci-image-tag: nightly-2026     an image tag

One directive a line, at column 0, nothing after the value. Values become `git ls-remote` arguments and
environment variables; they never reach a shell as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from miles_ci.bot.prose import prose_lines

NAMES = ("ci-sglang-pr", "ci-megatron-pr", "ci-image-tag")
_LINE = re.compile(r"(ci-[a-z]+(?:-[a-z]+)*):(.*)")
_PULL = re.compile(r"#[1-9]\d{0,6}")
_SHA = re.compile(r"[0-9a-f]{40}")
_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Target:
    """What a directive names: `kind` pull, sha or ref; `ref` is what to ask the origin for."""

    kind: str
    text: str

    @property
    def ref(self) -> str:
        return f"refs/pull/{self.text[1:]}/head" if self.kind == "pull" else self.text


@dataclass(frozen=True)
class Directives:
    sglang: Target | None = None
    megatron: Target | None = None
    image_tag: str | None = None

    def as_json(self) -> dict[str, str]:
        found = {"ci-sglang-pr": self.sglang, "ci-megatron-pr": self.megatron}
        out = {name: target.text for name, target in found.items() if target is not None}
        return out | ({"ci-image-tag": self.image_tag} if self.image_tag is not None else {})


@dataclass(frozen=True)
class Errors:
    """Everything wrong with the directives of one body, with line numbers."""

    messages: tuple[str, ...]


def parse_target(value: str) -> Target | str:
    """A dependency value, or what is wrong with it."""
    if value.startswith("#"):
        return Target("pull", value) if _PULL.fullmatch(value) else "a pull request is # and 1 to 7 digits"
    if _SHA.fullmatch(value):
        return Target("sha", value)
    forbidden = [part for part in ("..", "//", "@{") if part in value]
    if forbidden or value.endswith(("/", ".lock")) or not _REF.fullmatch(value):
        return "expected #NUMBER, 40 hex digits, or a branch or tag name"
    return Target("ref", value)


def parse_directives(body: str | None) -> Directives | Errors:
    """Read all directives of a description. Equal repetitions are fine, different ones are an error."""
    errors: list[str] = []
    values: dict[str, str] = {}
    for line in prose_lines(body):
        found = _LINE.fullmatch(line.text)
        if not found:
            continue
        name, rest = found[1], found[2]
        if name not in NAMES:
            if name.startswith(("ci-sglang", "ci-megatron", "ci-image")):
                errors.append(f"line {line.number}: {name} is not a directive; known: {', '.join(NAMES)}")
            continue
        problem = _store(values, name, rest)
        if problem:
            errors.append(f"line {line.number}: {name}: {problem}")
    if errors:
        return Errors(tuple(errors))
    sglang, megatron = (parse_target(values[name]) if name in values else None for name in NAMES[:2])
    assert not isinstance(sglang, str)
    assert not isinstance(megatron, str)
    return Directives(sglang, megatron, values.get("ci-image-tag"))


def _store(values: dict[str, str], name: str, rest: str) -> str | None:
    """Check one value and keep it; returns the problem."""
    form = re.fullmatch(r"[ \t]+(\S+)[ \t]*", rest)
    if not form:
        return "expected one value after the colon and nothing behind it"
    value = form[1]
    if name == "ci-image-tag":
        if not TAG.fullmatch(value):
            return "an image tag is up to 128 letters, digits, '_', '.' or '-'"
    else:
        target = parse_target(value)
        if isinstance(target, str):
            return target
    if values.setdefault(name, value) != value:
        return f"given twice with different values ({values[name]} and {value})"
    return None


def precedence(
    *, dispatch: Mapping[str, str], body: Directives, release: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Name -> (value, where it came from): dispatch input, then description, then release lock; absent = image."""
    chosen: dict[str, tuple[str, str]] = {}
    for name in NAMES:
        for values, source in ((dispatch, "dispatch"), (body.as_json(), "description"), (release, "release lock")):
            if values.get(name):
                chosen[name] = (values[name], source)
                break
    return chosen
