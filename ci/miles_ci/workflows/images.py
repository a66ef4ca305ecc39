"""Images by content: the key over what goes in, the tag made of it, and which commands build it.

key = sha256 over the sorted (path, bytes) of the key files, the base image's digest and the build args. Two trees
with the same key have the same image; a tag that exists is never built again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_ci.errors import UsageError, suggestion
from miles_ci.registry import Fleet
from miles_ci.select.globs import matches
from miles_ci.workflows.model import parse_yaml

CATALOG = Path("docker/images.yaml")


@dataclass(frozen=True)
class Recipe:
    """How one image is made; paths relative to the repository."""

    name: str
    repository: str
    dockerfile: str
    base: str
    build_args: Mapping[str, str]
    key_files: tuple[str, ...]


def recipe(fleet: Fleet, root: Path, name: str) -> Recipe:
    """The registry's entry and `docker/images.yaml` together. `UsageError` names what is missing."""
    if name not in fleet.images:
        raise UsageError(f"image '{name}' is not in registry.yaml{suggestion(name, fleet.images)}")
    entry = fleet.images[name]
    catalog = parse_yaml((root / CATALOG).read_text(encoding="utf-8"))
    made = catalog.get("images", {}).get(name)
    if not isinstance(made, dict) or set(made) != {"dockerfile", "base"}:
        raise UsageError(f"{CATALOG}: images.{name} needs exactly `dockerfile` and `base`")
    return Recipe(
        name, entry.repository, made["dockerfile"], made["base"], dict(entry.build_args), tuple(entry.key_files)
    )


def key_paths(root: Path, made: Recipe) -> list[Path]:
    """Files of the key, sorted; a glob that matches nothing is an error (it would silently key less)."""
    found: set[Path] = {root / CATALOG, root / made.dockerfile}
    files = [path for path in sorted(root.glob("*")) if path.is_file()]
    files += [path for path in sorted((root / "docker").rglob("*")) if path.is_file()]
    for glob in made.key_files:
        hits = {path for path in files if matches(path.relative_to(root).as_posix(), glob)}
        if not hits:
            raise UsageError(f"registry.yaml: images.{made.name}.key_files: {glob!r} matches no file")
        found |= hits
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def content_key(root: Path, made: Recipe, base_digest: str) -> str:
    """64 hex digits."""
    digest = hashlib.sha256()
    for path in key_paths(root, made):
        name, data = path.relative_to(root).as_posix().encode(), path.read_bytes()
        digest.update(b"%d:%b%d:" % (len(name), name, len(data)))
        digest.update(data)
    rest = {"base": made.base, "base_digest": base_digest, "build_args": dict(sorted(made.build_args.items()))}
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()


def tag_of(key: str) -> str:
    return f"ci-{key[:16]}"


def build_command(made: Recipe, key: str, base_digest: str, *, push: bool) -> list[str]:
    """The buildx call; the base is given by digest, so nothing can change between key and build."""
    base = made.base.split("@")[0] + f"@{base_digest}"
    args = {**made.build_args, "BASE_IMAGE": base}
    command = ["docker", "buildx", "build", "--file", made.dockerfile, "--tag", f"{made.repository}:{tag_of(key)}"]
    command += [part for name, value in sorted(args.items()) for part in ("--build-arg", f"{name}={value}")]
    return [*command, "--provenance=true", "--push" if push else "--load", "."]
