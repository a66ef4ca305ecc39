"""Dependency directives in a pull request's description: the only parser.

    ci-engine-pr: #1234            refs/pull/1234/head of the dependency `engine` of docker/images.yaml
    ci-engine-pr: dev              a branch or tag, or 40 hex digits
    ci-image-tag: nightly-2026     an image tag

One directive a line, at column 0, nothing after the value. Values become `git ls-remote` arguments and
environment variables; they never reach a shell as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_ci.bot.prose import prose_lines

IMAGE_TAG = "ci-image-tag"
_DEPENDENCY = re.compile(r"ci-([a-z]+(?:-[a-z]+)*)-pr")
# A plural, or another word about the image: meant as a directive, and none.
_NEARLY = re.compile(r"ci-(?:[a-z]+-)+prs|ci-image(?:-[a-z]+)*")
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
    """`targets` name of a dependency -> what to test of it. Whether the name exists is for the catalogue to say."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    image_tag: str | None = None

    def as_json(self) -> dict[str, str]:
        out = {directive_of(name): target.text for name, target in self.targets.items()}
        return out | ({IMAGE_TAG: self.image_tag} if self.image_tag is not None else {})


@dataclass(frozen=True)
class Errors:
    """Everything wrong with the directives of one body, with line numbers."""

    messages: tuple[str, ...]


def directive_of(dependency: str) -> str:
    return f"ci-{dependency}-pr"


def dependency_of(directive: str) -> str | None:
    """The dependency that a directive is about, None for the image tag and for any other text."""
    found = _DEPENDENCY.fullmatch(directive)
    return found[1] if found else None


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
        if name != IMAGE_TAG and dependency_of(name) is None:
            if _NEARLY.fullmatch(name):
                errors.append(f"line {line.number}: {name} is not a directive; known: ci-DEPENDENCY-pr, {IMAGE_TAG}")
            continue
        problem = _store(values, name, rest)
        if problem:
            errors.append(f"line {line.number}: {name}: {problem}")
    if errors:
        return Errors(tuple(errors))
    targets: dict[str, Target] = {}
    for name, value in values.items():
        dependency, target = dependency_of(name), parse_target(value)
        if dependency is not None and isinstance(target, Target):
            targets[dependency] = target
    return Directives(targets, values.get(IMAGE_TAG))


def _store(values: dict[str, str], name: str, rest: str) -> str | None:
    """Check one value and keep it; returns the problem."""
    form = re.fullmatch(r"[ \t]+(\S+)[ \t]*", rest)
    if not form:
        return "expected one value after the colon and nothing behind it"
    value = form[1]
    if name == IMAGE_TAG:
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
    for values, source in ((dispatch, "dispatch"), (body.as_json(), "description"), (release, "release lock")):
        for name, value in values.items():
            if value:
                chosen.setdefault(name, (value, source))
    return chosen
