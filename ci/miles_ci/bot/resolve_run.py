"""`resolve-deps`: directives and image of a run -> commits and an image reference.

Precedence: dispatch input, description, release lock, image default. A fork cannot push an image, so a fork
commit that needs a new one fails here with what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_ci.bot.dependency_checkouts import Dependency, known_dependency, resolve
from miles_ci.bot.directives import (
    IMAGE_TAG,
    Directives,
    Errors,
    dependency_of,
    directive_of,
    parse_directives,
    parse_target,
    precedence,
)
from miles_ci.bot.oci import Registry
from miles_ci.errors import UsageError
from miles_ci.registry import Fleet
from miles_ci.workflows import images
from miles_ci.workflows.model import parse_yaml

RELEASE_LOCK = Path("docker/release.lock.yaml")


@dataclass(frozen=True)
class Resolved:
    """`commits` dependency -> commit; `source` directive -> where it came from; `known` every dependency there is."""

    commits: Mapping[str, str]
    image_reference: str
    image_key: str
    image_build: bool
    source: Mapping[str, str]
    known: Sequence[str] = ()

    def outputs(self) -> dict[str, str]:
        return {
            "dependency_commits": json.dumps(dict(self.commits), sort_keys=True),
            "image_build": "true" if self.image_build else "false",
            "image_key": self.image_key,
            "image_reference": self.image_reference,
        }

    def summary(self) -> str:
        rows = [
            f"| {name} | {self.commits.get(name) or 'the image’s copy'} "
            f"| {self.source.get(directive_of(name), 'image default')} |"
            for name in self.known
        ]
        lines = ["### Dependencies", "", "| dependency | commit | from |", "|---|---|---|", *rows]
        return (
            "\n".join([*lines, "", f"Image: `{self.image_reference}`" + (" (to be built)" if self.image_build else "")])
            + "\n"
        )


def resolve_commits(
    directives: Directives, dependencies: Mapping[str, Dependency], ask: Callable[..., str] = resolve
) -> dict[str, str]:
    """Directive name -> commit (or image tag) for what a description names."""
    out = {}
    for name, target in directives.targets.items():
        out[directive_of(name)] = ask(known_dependency(dependencies, name), target)
    if directives.image_tag is not None:
        out[IMAGE_TAG] = directives.image_tag
    return out


def release_lock(root: Path, cadence: str) -> dict[str, str]:
    """What a release is pinned to; only for the release cadence."""
    path = root / RELEASE_LOCK
    if cadence != "release" or not path.is_file():
        return {}
    data = parse_yaml(path.read_text(encoding="utf-8")) or {}
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise UsageError(f"{RELEASE_LOCK}: expected directive names with text values")
    return data


def resolve_run(
    *,
    body: str,
    dispatch: Mapping[str, str],
    cadence: str,
    fork: bool,
    root: Path,
    fleet: Fleet,
    image: str,
    dependencies: Mapping[str, Dependency],
    registry: Registry,
    ask: Callable[..., str] = resolve,
) -> Resolved:
    """Everything a run needs to know about dependencies. Raises `UsageError` with every directive error."""
    parsed = parse_directives(body)
    if isinstance(parsed, Errors):
        raise UsageError("pull request description: " + "; ".join(parsed.messages))
    chosen = precedence(dispatch=dispatch, body=parsed, release=release_lock(root, cadence))
    commits: dict[str, str] = {}
    for key, (value, where) in chosen.items():
        if key == IMAGE_TAG:
            continue
        name, target = dependency_of(key), parse_target(value)
        if name is None:
            raise UsageError(f"{key} ({where}) is not a directive; known: ci-DEPENDENCY-pr, {IMAGE_TAG}")
        if isinstance(target, str):
            raise UsageError(f"{key} ({where}): {target}")
        commits[name] = ask(known_dependency(dependencies, name), target)
    source = {name: where for name, (_, where) in chosen.items()}
    made = images.recipe(fleet, root, image)
    if IMAGE_TAG in chosen:
        return Resolved(commits, f"{made.repository}:{chosen[IMAGE_TAG][0]}", "", False, source, sorted(dependencies))
    base = registry.digest(made.base)
    if base is None:
        raise UsageError(f"base image {made.base} does not exist")
    key = images.content_key(root, made, base)
    reference = f"{made.repository}:{images.tag_of(key)}"
    build = registry.digest(reference) is None
    if build and fork:
        raise UsageError(
            f"this change needs a new image ({reference}), and a fork cannot push one: "
            "a maintainer pushes the branch to this repository, or names an existing image with ci-image-tag"
        )
    return Resolved(commits, reference, key, build, source, sorted(dependencies))
