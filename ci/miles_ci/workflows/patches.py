"""Apply a patch to a git checkout once: applied, already present, or refused. Never half, never twice.

`git apply --check` forward and reverse decide; a patch that fits both ways or neither is refused and the tree is
left untouched.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Applied:
    patch: Path


@dataclass(frozen=True)
class AlreadyPresent:
    patch: Path


@dataclass(frozen=True)
class Refused:
    """`reason` is for a person; git's own words are included."""

    patch: Path
    reason: str


Result = Applied | AlreadyPresent | Refused


def _git(repo: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(repo), *args], capture_output=True, text=True, check=False, timeout=120)


def check_patch(repo: Path, patch: Path) -> Result:
    """What `apply_patch` would do; changes nothing. `Applied` stands for "applies"."""
    if not patch.is_file():
        return Refused(patch, f"{patch}: no such patch")
    if not patch.read_bytes().strip():
        return Refused(patch, f"{patch}: the patch is empty")
    place = str(patch.resolve())
    forward = _git(repo, "apply", "--check", place)
    reverse = _git(repo, "apply", "--check", "--reverse", place)
    if forward.returncode == 0 and reverse.returncode != 0:
        return Applied(patch)
    if reverse.returncode == 0 and forward.returncode != 0:
        return AlreadyPresent(patch)
    if forward.returncode == 0:
        return Refused(patch, f"{patch}: applies forward and in reverse, so its context is ambiguous")
    return Refused(patch, f"{patch}: applies neither forward nor in reverse: {forward.stderr.strip()[:2000]}")


def apply_patch(repo: Path, patch: Path) -> Result:
    """Apply a patch to the working tree. After `Refused` the tree is what it was."""
    state = check_patch(repo, patch)
    if not isinstance(state, Applied):
        return state
    done = _git(repo, "apply", str(patch.resolve()))
    # git apply is atomic: it changed nothing if it failed after the check (a race with another writer).
    return state if done.returncode == 0 else Refused(patch, f"{patch}: {done.stderr.strip()[:2000]}")


def apply_all(repo: Path, patches: list[Path]) -> list[Result]:
    """Apply in order, stopping at the first refusal; the caller turns `Refused` into exit code 1."""
    results: list[Result] = []
    for patch in patches:
        results.append(apply_patch(repo, patch))
        if isinstance(results[-1], Refused):
            break
    return results
