"""The command: draw changes of each package, try them, and say what survived."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from checks.mutants.changes import Change
from checks.mutants.copy import Copy
from checks.mutants.reach import Reach, measure
from checks.mutants.settings import Package, Settings, read_settings
from checks.mutants.trial import Outcome, Trials

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Path(__file__).with_name("mutants.toml")
_MEASURING_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0: enough was seen in each package. 1: too little, or a listed survivor that is none. 2: usage."""
    parser = argparse.ArgumentParser(prog="python -m checks.mutants", description=__doc__)
    parser.add_argument("packages", nargs="*", help="folders, by default every one of mutants.toml")
    parser.add_argument("--sample", type=int, default=30, help="changes of each package; 0: all (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="draws other changes (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write every outcome as JSON")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--settings", type=Path, default=SETTINGS)
    given = parser.parse_args(arguments)
    try:
        settings = read_settings(given.settings)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{given.settings}: {error}")
    if unknown := [name for name in given.packages if name.rstrip("/") not in settings.packages]:
        parser.error(f"{', '.join(unknown)}: not in {given.settings.name}, which has {', '.join(settings.packages)}")
    if given.sample < 0:
        parser.error("--sample must be 0 or more")
    wanted = [settings.packages[name.rstrip("/")] for name in given.packages] or list(settings.packages.values())
    stale = stale_survivors(settings, given.root)
    for line in stale:
        print(line)
    _prepare(settings.preload)
    roots = tomllib.loads((given.root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(given.root, Path(folder), tuple(roots))
        outcomes: dict[str, list[Outcome]] = {}
        for tests in dict.fromkeys(tuple(package.tests) for package in wanted):
            together = [package for package in wanted if tuple(package.tests) == tests]
            reach = _measure(copy, together)
            trials = Trials(copy, reach, patience_s=settings.patience_s)
            for package in together:
                outcomes[package.folder] = _try(trials, package, settings, given.sample, given.seed)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(
            json.dumps({name: [asdict(one) for one in found] for name, found in outcomes.items()}, indent=1)
        )
    everything = [one for found in outcomes.values() for one in found]
    print(summary("all", everything))
    low = [package for package in wanted if share(outcomes[package.folder]) < package.share]
    for package in low:
        print(f"{package.folder}: less than the {package.share:.0%} that {given.settings.name} asks for")
    return 1 if stale or low else 0


def stale_survivors(settings: Settings, root: Path) -> list[str]:
    """Listed survivors that are no change of today's code: the code went, and so must the entry."""
    possible = {change.identity for package in settings.packages.values() for change in package.changes(root)}
    return [
        f"stale: {path} {within}: `{before}` -> `{after}` is listed as a survivor, but no such change can be made"
        for path, within, _, before, after in settings.survivors.keys() - possible
    ]


def drawn(changes: Sequence[Change], count: int, seed: str) -> list[Change]:
    """`count` of them (0: all), in order of place. Each change has its own number, by `seed` and what names it, so that
    the same ones are drawn while other code comes and goes."""
    seen: Counter[tuple[str, ...]] = Counter()
    numbered = []
    for change in changes:
        seen[change.identity] += 1
        words = "\0".join([seed, str(seen[change.identity]), *change.identity])
        numbered.append((hashlib.sha256(words.encode()).digest(), change))
    return sorted(change for _, change in sorted(numbered)[: count or None])


def share(outcomes: Sequence[Outcome]) -> float:
    """Of what was tried, the part that was seen; 1 when nothing was."""
    tried = [one for one in outcomes if one.verdict != "listed"]
    return sum(one.verdict in ("seen", "stopped") for one in tried) / len(tried) if tried else 1.0


def summary(name: str, outcomes: Sequence[Outcome]) -> str:
    count = {verdict: sum(one.verdict == verdict for one in outcomes)
             for verdict in ("seen", "stopped", "survived", "unreached", "listed")}  # fmt: skip
    parts = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    return f"{name}: {len(outcomes)} changes: {parts or 'none'}; {share(outcomes):.1%} of those tried were noticed"


def _prepare(libraries: Sequence[str]) -> None:
    """One thread each, before any library starts its own: children are forked."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    for name in ("pytest", *libraries):
        importlib.import_module(name)


def _measure(copy: Copy, packages: Sequence[Package]) -> Reach:
    """Packages with the same tests are measured together."""
    folders = [package.folder for package in packages]
    started = time.monotonic()
    reach = measure(copy, folders, packages[0].test_files(copy.root), limit_s=_MEASURING_S)
    took = time.monotonic() - started
    print(f"{', '.join(folders)}: {len(reach.seconds)} tests measured in {took:.0f} s", flush=True)
    for item in sorted(reach.failed):
        print(f"  left out, fails without any change: {item}")
    return reach


def _try(trials: Trials, package: Package, settings: Settings, count: int, seed: str) -> list[Outcome]:
    changes = package.changes(trials.copy.root)
    chosen = drawn(changes, count, f"{seed}:{package.folder}")
    print(f"{package.folder}: {len(changes)} possible changes, {len(chosen)} drawn with seed {seed}", flush=True)
    reach = trials.reach
    outcomes: list[Outcome] = []
    if chosen and (fault := trials.control(max(chosen, key=lambda change: len(reach.items(change))))):
        raise RuntimeError(f"{package.folder}: its tests fail without a change\n{fault}")
    for change in chosen:
        reason = settings.survivors.get(change.identity)
        outcome = Outcome(change, "listed", 0, reason) if reason is not None else trials.run(change)
        outcomes.append(outcome)
        if outcome.verdict in ("survived", "unreached", "stopped"):
            print(f"  {outcome.verdict:9} {change} ({outcome.detail})", flush=True)
    print(summary(package.folder, outcomes), flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
