"""Second job of a rerun: which registrations of the file run, on which machines, with which image.

Code and fleet come from the default branch; the pull request's test file is read as data, by AST.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_ci.bot.directives import dependency_of
from miles_ci.bot.rerun.request import Request
from miles_ci.declare.tree import scan_tree
from miles_ci.declare.vocabulary import Vocabulary
from miles_ci.errors import UsageError, suggestion
from miles_ci.registry import Fleet
from miles_ci.registry.hosted import is_hosted
from miles_ci.select.registrations import Registration, build_catalog, eligible_pools
from miles_ci.workflows.parts import EXTRA_MINUTES

BACKENDS = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Leg:
    """One execution: a registration of the file on one machine."""

    suite: str
    backend: str
    hardware: str
    runs_on: tuple[str, ...]
    timeout_minutes: int


def registrations(root: Path, fleet: Fleet, test_file: str) -> list[Registration]:
    """What the file declares. `UsageError` when it is absent, faulty or declares nothing."""
    path = root / test_file
    if not path.is_file() or path.is_symlink():
        raise UsageError(f"{test_file} does not exist at this commit")
    scan = scan_tree(root, roots=fleet.roots, vocabulary=Vocabulary.adding(list(fleet.backends)))
    catalog = build_catalog(scan, fleet, observed=lambda path, suite: True)
    fault = next((item for item in catalog.faults if item.path == test_file), None)
    if fault is not None:
        raise UsageError("\n".join(error.text() for error in fault.errors))
    found = [item for item in catalog.registrations if item.path == test_file]
    if not found:
        raise UsageError(f"{test_file} declares no test")
    return found


def legs(root: Path, fleet: Fleet, request: Request, *, self_hosted: bool) -> list[Leg]:
    """Every enabled registration, narrowed by `suite=`.

    `self_hosted` False: the commit may not run on machines of ours, so everything but hosted CPU legs is refused.
    """
    found = registrations(root, fleet, request.test_file)
    if request.suite:
        suites = [item.suite for item in found]
        if request.suite not in suites:
            raise UsageError(
                f"{request.test_file} is not registered in suite '{request.suite}'{suggestion(request.suite, suites)}"
            )
        found = [item for item in found if item.suite == request.suite]
    out: list[Leg] = []
    refused: list[str] = []
    for item in found:
        leg = _leg(fleet, item)
        if isinstance(leg, str):
            refused.append(leg)
        elif not self_hosted and not is_hosted(leg.runs_on):
            refused.append(
                f"{item.suite}: this commit is not approved for self-hosted runners (`/ok-to-test {request.head_sha[:12]}`)"
            )
        else:
            out.append(leg)
    if not out:
        raise UsageError("nothing to run: " + "; ".join(refused))
    return out


def _leg(fleet: Fleet, item: Registration) -> Leg | str:
    suite = fleet.suites[item.suite]
    if item.declaration.disabled is not None:
        return f"{item.suite}: disabled: {item.declaration.disabled.reason}"
    minutes = -(-suite.timeout_s // 60) + EXTRA_MINUTES
    if suite.backend in fleet.backends:
        return f"{item.suite}: suites of backend '{suite.backend}' are run by a workflow of the project's own"
    if suite.backend == "cpu":
        return Leg(item.suite, "cpu", "cpu", tuple(suite.runs_on), minutes)
    enabled = fleet.enabled_pools(item.suite)
    fitting = [name for name in eligible_pools(fleet, item.declaration, item.suite) if name in enabled]
    if not fitting:
        off = [pool.disabled.reason for pool in fleet.fitting_pools(item.suite).values() if pool.disabled]
        return f"{item.suite}: no pool: {off[0] if off else 'none fits'}"
    pool = fleet.pools[fitting[0]]
    return Leg(item.suite, suite.backend, pool.hardware, tuple(pool.labels), minutes)


def outputs(sha: str, found: list[Leg], images: Mapping[str, str], commits: Mapping[str, str]) -> dict[str, str]:
    """Job outputs: the commit that was judged, a matrix and a count for each backend, what was planned, dependencies."""
    out: dict[str, str] = {"sha": sha}
    for backend in BACKENDS:
        entries = [
            {
                "suite": leg.suite,
                "runs_on": list(leg.runs_on),
                "timeout_minutes": leg.timeout_minutes,
                **({"image": images[backend]} if backend != "cpu" else {}),
            }
            for leg in found
            if leg.backend == backend
        ]
        out[f"matrix_{backend}"] = json.dumps({"include": entries}, separators=(",", ":"))
        out[f"count_{backend}"] = str(len(entries))
    out["planned"] = json.dumps({leg.suite: leg.hardware for leg in found}, sort_keys=True)
    named = {dependency_of(directive): commit for directive, commit in commits.items()}
    named.pop(None, None)
    return out | {"dependency_commits": json.dumps(named, sort_keys=True)}
