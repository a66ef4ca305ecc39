"""Render every workflow from the registry, compare with what is committed, write.

`render` is pure: the same registry gives the same bytes. A file in the folder that the generator does not know
is drift too: nothing there is edited or added by hand.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from miles_ci.errors import UsageError
from miles_ci.files import write_whole
from miles_ci.registry import Fleet
from miles_ci.workflows.emit import to_yaml
from miles_ci.workflows.files import bots, pr_test, reusable, scheduled, service
from miles_ci.workflows.harness import place_harness

FOLDER = Path(".github/workflows")
HEADER = "Generated from registry.yaml by `miles-ci generate`. Do not edit; run `miles-ci generate` instead."


def render(fleet: Fleet) -> dict[str, str]:
    """Path relative to the repository -> text, for every workflow."""
    refuse_unusable(fleet)
    documents = reusable.documents() | pr_test.documents(fleet) | scheduled.documents(fleet) | service.documents(fleet)
    watched = ["nightly.yml", "pr-test.yml", "pr-test-rocm.yml", "release.yml", "weekly.yml"]
    documents |= bots.documents(fleet, [documents[name]["name"] for name in watched if name in documents])
    return {
        (FOLDER / name).as_posix(): to_yaml(place_harness(documents[name], fleet.harness), header=HEADER)
        for name in sorted(documents)
    }


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return HEADER.encode() in file.read(4096)


def refuse_unusable(fleet: Fleet) -> None:
    """A suite that no runner could ever take must not become a job that waits for ever."""
    for name, suite in fleet.suites.items():
        if suite.backend != "cpu" and not fleet.fitting_pools(name):
            raise UsageError(
                f"registry.yaml: suites.{name}: no pool carries the labels of a runner with {suite.gpus} devices; "
                "name a fitting pool in `pools`"
            )


def drift(fleet: Fleet, root: Path) -> str:
    """Unified diff between what is committed and what would be written; empty when there is none."""
    wanted = render(fleet)
    present = {path.relative_to(root).as_posix(): path for path in sorted((root / FOLDER).glob("*.y*ml"))}
    out: list[str] = []
    for name in sorted(wanted.keys() | present.keys()):
        old = present[name].read_bytes().decode("utf-8") if name in present else ""
        new = wanted.get(name, "")
        if old != new:
            out += difflib.unified_diff(
                old.splitlines(True), new.splitlines(True), f"committed/{name}", f"generated/{name}"
            )
    return "".join(out)


def write(fleet: Fleet, root: Path) -> list[str]:
    """Write what differs (temporary name, fsync, rename), remove files of ours that have no source any more.

    Returns the changed paths. A file that was not generated is somebody's work: `UsageError`, nothing is written.
    """
    wanted, changed = render(fleet), []
    strangers = [path.name for path in sorted((root / FOLDER).glob("*.y*ml")) if not _is_ours(path)]
    if strangers:
        raise UsageError(
            f"{FOLDER.as_posix()}: not generated from the registry: {', '.join(strangers)}; nothing was written. "
            "Everything in this folder is generated: move what these files do elsewhere, or delete them"
        )
    for name, text in wanted.items():
        path = root / name
        if path.exists() and path.read_bytes() == text.encode():
            continue
        write_whole(path, text.encode())
        changed.append(name)
    for path in sorted((root / FOLDER).glob("*.y*ml")):
        if path.relative_to(root).as_posix() not in wanted:
            path.unlink()
            changed.append(path.relative_to(root).as_posix())
    return changed
