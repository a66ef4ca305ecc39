"""Dependencies that a directive names: resolved to commits once, then fetched, patched and installed in order.

Only the named dependency is touched; the other stays the image's copy. Refs go to `git ls-remote` as arguments
after `--`, on the one allow-listed origin; nothing here passes through a shell.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_ci.bot.directives import Target, dependency_of, directive_of
from miles_ci.errors import CiError, ExitCode, UsageError, suggestion
from miles_ci.workflows.images import CATALOG
from miles_ci.workflows.model import parse_yaml
from miles_ci.workflows.patches import Refused, apply_all, check_patch

SHA = re.compile(r"[0-9a-f]{40}")


class DependencyError(CiError):
    """A directive cannot be resolved, or a step on the checkout failed."""

    exit_code = ExitCode.TEST_FAILURE


@dataclass(frozen=True)
class Dependency:
    name: str
    origin: str
    path: Path
    install: str
    patches: Path


def load_dependencies(root: Path) -> dict[str, Dependency]:
    """What `docker/images.yaml` allows to be named; nothing when a repository has no such file."""
    if not (root / CATALOG).is_file():
        return {}
    data = parse_yaml((root / CATALOG).read_text(encoding="utf-8")).get("dependencies")
    out = {}
    for name, entry in (data or {}).items():
        if dependency_of(directive_of(str(name))) != name:
            raise UsageError(f"{CATALOG}: dependencies.{name}: a name is words of small letters joined by '-'")
        if not isinstance(entry, dict) or set(entry) != {"origin", "path", "install", "patches"}:
            raise UsageError(f"{CATALOG}: dependencies.{name} needs exactly origin, path, install, patches")
        out[name] = Dependency(name, entry["origin"], Path(entry["path"]), entry["install"], root / entry["patches"])
    return out


def known_dependency(dependencies: Mapping[str, Dependency], name: str) -> Dependency:
    """The catalogue's entry. `UsageError` names what the catalogue has."""
    if name not in dependencies:
        known = ", ".join(sorted(dependencies)) or "none"
        raise UsageError(f"dependency '{name}' is not in {CATALOG}; known: {known}{suggestion(name, dependencies)}")
    return dependencies[name]


Run = Callable[[Sequence[str]], str]


def run_command(command: Sequence[str]) -> str:
    """Run without a shell; `DependencyError` carries the tool's own words."""
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise DependencyError(f"{' '.join(command[:4])} …: exit {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def resolve(dependency: Dependency, target: Target, run: Run = run_command) -> str:
    """The commit a directive names, 40 hex digits. Unresolvable or ambiguous names are errors."""
    if target.kind == "sha":
        return target.text
    patterns = (
        [target.ref]
        if target.kind == "pull"
        else [f"refs/heads/{target.ref}", f"refs/tags/{target.ref}", f"refs/tags/{target.ref}^{{}}"]
    )
    listed = run(["git", "ls-remote", "--", dependency.origin, *patterns])
    found = {name: sha for sha, _, name in (line.partition("\t") for line in listed.splitlines()) if name in patterns}
    peeled = f"refs/tags/{target.ref}^{{}}"
    if peeled in found:  # an annotated tag: the commit, not the tag object
        found[f"refs/tags/{target.ref}"] = found.pop(peeled)
    commits = set(found.values())
    if not commits:
        raise DependencyError(f"{directive_of(dependency.name)}: {target.text} does not exist at {dependency.origin}")
    if len(commits) > 1:
        raise DependencyError(
            f"{directive_of(dependency.name)}: {target.text} is both a branch and a tag at {dependency.origin}"
        )
    commit = commits.pop()
    if not SHA.fullmatch(commit):
        raise DependencyError(
            f"{directive_of(dependency.name)}: {dependency.origin} answered no commit for {target.text}"
        )
    return commit


def checkout(dependency: Dependency, commit: str, run: Run = run_command) -> None:
    """Fetch one commit, reset hard, clean: nothing of an earlier checkout is left."""
    git = ["git", "-C", str(dependency.path)]
    run([*git, "fetch", "--no-tags", "--depth", "1", dependency.origin, commit])
    run([*git, "reset", "--hard", commit])
    run([*git, "clean", "-ffdx"])


def patches_of(dependency: Dependency) -> list[Path]:
    return sorted(dependency.patches.glob("*.patch"))


def check(dependency: Dependency) -> list[str]:
    """State of each patch on the checkout. Raises `DependencyError` when one is refused."""
    lines = []
    for patch in patches_of(dependency):
        state = check_patch(dependency.path, patch)
        if isinstance(state, Refused):
            raise DependencyError(state.reason)
        lines.append(f"{patch.name}: {type(state).__name__}")
    return lines


def apply(dependency: Dependency) -> list[str]:
    """Apply every patch in order of name."""
    results = apply_all(dependency.path, patches_of(dependency))
    for result in results:
        if isinstance(result, Refused):
            raise DependencyError(result.reason)
    return [f"{result.patch.name}: {type(result).__name__}" for result in results]


def install(dependency: Dependency, run: Run = run_command) -> None:
    place = str(dependency.path / dependency.install)
    run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--editable", place])


def perform(
    verb: str, dependencies: dict[str, Dependency], commits: dict[str, str], run: Run = run_command
) -> list[str]:
    """One of the four steps for every named dependency; returns lines for the log."""
    lines = []
    for name, commit in sorted(commits.items()):
        if not commit:
            continue
        if not SHA.fullmatch(commit):
            raise UsageError(f"{name}: {commit[:60]!r} is not a commit of 40 hex digits")
        dependency = known_dependency(dependencies, name)
        if verb == "checkout":
            checkout(dependency, commit, run)
            lines.append(f"{name}: at {commit}")
        elif verb == "check":
            lines += [f"{name}: {line}" for line in check(dependency)]
        elif verb == "apply":
            lines += [f"{name}: {line}" for line in apply(dependency)]
        else:
            install(dependency, run)
            lines.append(f"{name}: installed from {dependency.path}")
    return lines or ["nothing named: the image's copies are used"]
