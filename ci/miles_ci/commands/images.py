"""Images by content, dependencies by commit, counted edits and patches.

miles-ci images key --image cuda --base-digest sha256:…   content key and tag
miles-ci images build --image cuda --push                  build what the registry lacks
miles-ci images edits --repo DIR --commit SHA --edits docker/edits/cu12.yaml
miles-ci images patches --repo DIR --patches docker/patches/engine
miles-ci images dependencies checkout|check|apply|install  from DEPENDENCY_COMMITS, a JSON object
miles-ci images metadata --forbid cu13                     no installed distribution may require it
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from miles_ci.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from miles_ci.bot.oci import Registry
    from miles_ci.workflows.images import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    key = verbs.add_parser("key", help="print content key and tag of an image")
    build = verbs.add_parser("build", help="build (and push) images whose tag does not exist yet")
    for entry in (key, build):
        entry.add_argument("--image", default="", help="image of registry.yaml (build: empty for all)")
        entry.add_argument(
            "--base-digest", default="", help="digest of the base image; asked from its registry if absent"
        )
        entry.add_argument("--root", type=Path, default=Path("."))
    build.add_argument("--key", default="", help="refuse to build anything but this content key")
    build.add_argument("--push", action="store_true")
    build.add_argument("--dry-run", action="store_true", help="print the commands only")
    edits = verbs.add_parser("edits", help="clean checkout, then replay counted edits")
    edits.add_argument("--repo", type=Path, required=True)
    edits.add_argument("--commit", required=True)
    edits.add_argument("--edits", type=Path, required=True)
    patches = verbs.add_parser("patches", help="apply every *.patch of a folder once")
    patches.add_argument("--repo", type=Path, required=True)
    patches.add_argument("--patches", type=Path, required=True)
    dependencies = verbs.add_parser("dependencies", help="one step on the dependencies a directive named")
    dependencies.add_argument("step", choices=("checkout", "check", "apply", "install"))
    dependencies.add_argument("--root", type=Path, default=Path("."))
    metadata = verbs.add_parser("metadata", help="fail if an installed distribution requires a word")
    metadata.add_argument("--forbid", required=True)
    metadata.add_argument("--site", type=Path, default=Path(sysconfig.get_paths()["purelib"]))


def main(args: argparse.Namespace) -> int:
    return {
        "key": _key,
        "build": _build,
        "edits": _edits,
        "patches": _patches,
        "dependencies": _dependencies,
        "metadata": _metadata,
    }[args.verb](args)


def _plan(args: argparse.Namespace, name: str) -> tuple[Recipe, str, str, Registry]:
    from miles_ci.bot.oci import Registry
    from miles_ci.registry import load_fleet
    from miles_ci.workflows import images

    made = images.recipe(load_fleet(args.root / "registry.yaml", shown_as="registry.yaml"), args.root, name)
    registry = Registry(os.environ.get("GITHUB_TOKEN", ""))
    base_digest = args.base_digest or registry.digest(made.base)
    if not base_digest:
        raise UsageError(f"base image {made.base} does not exist")
    return made, images.content_key(args.root, made, base_digest), base_digest, registry


def _key(args: argparse.Namespace) -> int:
    from miles_ci.workflows.images import tag_of

    if not args.image:
        raise UsageError("images key needs --image NAME")
    made, key, base_digest, _ = _plan(args, args.image)
    print(f"{key}  {made.repository}:{tag_of(key)}  base {made.base}@{base_digest}")
    return ExitCode.OK


def _build(args: argparse.Namespace) -> int:
    from miles_ci.registry import load_fleet
    from miles_ci.workflows.images import build_command, tag_of

    names = [args.image] if args.image else list(load_fleet(args.root / "registry.yaml").images)
    for name in names:
        made, key, base_digest, registry = _plan(args, name)
        if args.key and args.key != key:
            raise UsageError(
                f"image {name}: its content has key {key[:16]}, asked for {args.key[:16]}: the base tag moved or another commit is checked out"
            )
        command = build_command(made, key, base_digest, push=args.push)
        if args.dry_run:
            print(" ".join(command))
            continue
        if registry.digest(f"{made.repository}:{tag_of(key)}"):
            print(f"{name}: {made.repository}:{tag_of(key)} exists")
            continue
        print(f"{name}: building {made.repository}:{tag_of(key)}", flush=True)
        code = subprocess.run(command, cwd=args.root, check=False).returncode
        if code != 0:
            print(f"{name}: docker buildx exited {code}", file=sys.stderr)
            return ExitCode.TEST_FAILURE
    return ExitCode.OK


def _edits(args: argparse.Namespace) -> int:
    from miles_ci.workflows.edits import clean_checkout, load_edits, replay_edits

    edits = load_edits(args.edits)
    clean_checkout(args.repo, args.commit)
    for entry in replay_edits(args.repo, edits):
        print(f"{entry.edit.file}: {entry.edit.find!r}: {entry.status}")
    return ExitCode.OK


def _patches(args: argparse.Namespace) -> int:
    from miles_ci.workflows.patches import Refused, apply_all

    if not args.patches.is_dir():
        raise UsageError(f"{args.patches}: no such folder")
    results = apply_all(args.repo, sorted(args.patches.glob("*.patch")))
    for result in results:
        print(f"{result.patch.name}: {type(result).__name__}")
        if isinstance(result, Refused):
            print(result.reason, file=sys.stderr)
            return ExitCode.TEST_FAILURE
    print(f"{len(results)} patches")
    return ExitCode.OK


def _dependencies(args: argparse.Namespace) -> int:
    from miles_ci.bot.dependency_checkouts import load_dependencies, perform
    from miles_ci.report.strict_json import loads

    commits = loads(os.environ.get("DEPENDENCY_COMMITS") or "{}", what="DEPENDENCY_COMMITS")
    if not isinstance(commits, dict) or not all(isinstance(commit, str) for commit in commits.values()):
        raise UsageError("DEPENDENCY_COMMITS: expected a JSON object of dependency -> commit")
    for line in perform(args.step, load_dependencies(args.root), commits):
        print(line)
    return ExitCode.OK


def _metadata(args: argparse.Namespace) -> int:
    from miles_ci.workflows.edits import mentions

    found = mentions(args.site, args.forbid)
    for line in found:
        print(line)
    print(f"{len(found)} requirements mention {args.forbid}")
    return ExitCode.TEST_FAILURE if found else ExitCode.OK
