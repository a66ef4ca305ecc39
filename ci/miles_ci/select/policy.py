"""Cadence and pull-request labels -> what is admitted. Pure; the table of the spec as code.

The set of included domain labels is decided by the first that applies: `run-ci-all`, weekly or release,
nightly (cadence or label), `run-ci-image`, regular; then explicitly requested `run-ci-<x>` are added. A
subtraction is no veto: a test with another included label is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles_ci.errors import UsageError, nearest, suggestion
from miles_ci.registry.model import Fleet

PREFIX = "run-ci-"
ALL, IMAGE, NIGHTLY, BYPASS = "run-ci-all", "run-ci-image", "nightly", "bypass-fastfail"
CADENCES = ("regular", "nightly", "weekly", "release")


@dataclass(frozen=True)
class Policy:
    """What one run admits. `scope` names what decided `include`, for explanations."""

    cadence: str
    labels: tuple[str, ...]
    include: frozenset[str]
    requested: frozenset[str]
    scope: str
    admit_nightly: bool
    use_affected: bool
    bypass_fastfail: bool
    write_baseline: bool
    arches: str
    expired_runs: bool
    warnings: tuple[str, ...]

    @classmethod
    def resolve(
        cls,
        fleet: Fleet,
        cadence: str = "regular",
        labels: Iterable[str] = (),
        *,
        all_labels: bool = False,
        typed: bool = False,
    ) -> Policy:
        """The policy of a run. `all_labels` is the opt-in of a manual dispatch.

        Raises `UsageError` for an unknown cadence. Labels without meaning here are ignored, since a pull request
        carries others too, except that an unknown `run-ci-*` becomes a warning with the nearest name. `typed`: a
        person gave the labels for this run alone, so every one that selects nothing becomes a warning.
        """
        if cadence not in CADENCES:
            raise UsageError(f"cadence '{cadence}' is not known{suggestion(cadence, CADENCES)}")
        given = tuple(sorted(set(labels)))
        domain = frozenset(fleet.labels.domain)
        requested = frozenset(label[len(PREFIX) :] for label in given if label.startswith(PREFIX)) & domain
        include, scope = _included(fleet, cadence, given, domain, all_labels)
        effective = fleet.cadences[NIGHTLY if cadence == "regular" and NIGHTLY in given else cadence]  # type: ignore[index]
        scheduled = fleet.cadences[cadence]  # type: ignore[index]
        widened = ALL in given or IMAGE in given or all_labels
        return cls(
            cadence=cadence,
            labels=given,
            include=include | requested,
            requested=requested,
            scope=scope,
            admit_nightly=effective.admit_nightly,
            use_affected=cadence == "regular" and NIGHTLY not in given and not widened,
            bypass_fastfail=effective.bypass_fastfail or BYPASS in given,
            write_baseline=scheduled.write_baseline,
            arches=scheduled.arches,
            expired_runs=cadence in ("nightly", "weekly"),
            warnings=_unknown_labels(fleet, given, typed),
        )

    def admits_labels(self, test_labels: Iterable[str], *, is_cpu: bool) -> bool:
        """Whether the label rule admits a test: a CPU test without labels always passes it."""
        names = set(test_labels)
        return (is_cpu and not names) or bool(names & self.include)


def _included(
    fleet: Fleet, cadence: str, given: tuple[str, ...], domain: frozenset[str], all_labels: bool
) -> tuple[frozenset[str], str]:
    scope_labels = fleet.labels.scope
    if ALL in given or all_labels:
        subtract = scope_labels[ALL].subtract if ALL in scope_labels else []
        return domain - frozenset(subtract), f"label {ALL}" if ALL in given else "--all-labels"
    if cadence in ("weekly", "release"):
        return _of_cadence(fleet, cadence, domain), f"cadence {cadence}"
    if cadence == NIGHTLY:
        return _of_cadence(fleet, NIGHTLY, domain), "cadence nightly"
    if NIGHTLY in given:
        subtract = scope_labels[NIGHTLY].subtract if NIGHTLY in scope_labels else []
        return _of_cadence(fleet, NIGHTLY, domain) - frozenset(subtract), "label nightly"
    if IMAGE in given:
        subtract = scope_labels[IMAGE].subtract if IMAGE in scope_labels else []
        return domain - frozenset(subtract), f"label {IMAGE}"
    return _of_cadence(fleet, cadence, domain), f"cadence {cadence}"


def _of_cadence(fleet: Fleet, cadence: str, domain: frozenset[str]) -> frozenset[str]:
    item = fleet.cadences[cadence]  # type: ignore[index]
    return domain - frozenset(item.subtract) if item.include == "all" else frozenset()


def _unknown_labels(fleet: Fleet, given: tuple[str, ...], typed: bool) -> tuple[str, ...]:
    known = [PREFIX + name for name in fleet.labels.domain]
    known += [*fleet.labels.scope, *fleet.labels.behaviour]
    bare = [name.removeprefix(PREFIX) for name in known if name.startswith(PREFIX)]
    warnings = []
    for label in given:
        if label in known or not (typed or label.startswith(PREFIX)):
            continue
        if label in bare:
            warnings.append(f"label '{label}' selects nothing; a run asks for it as '{PREFIX}{label}'")
            continue
        near, near_bare = nearest(label, known), nearest(label, bare)
        near = near or (None if near_bare is None else PREFIX + near_bare)
        hint = f"; did you mean '{near}'?" if near else ""
        warnings.append(f"label '{label}' is not known and selects nothing{hint}")
    return tuple(warnings)


def cadence_of_cron(fleet: Fleet, cron: str) -> str:
    """The cadence that a schedule event belongs to; a cron absent from the registry is an error."""
    for name, cadence in fleet.cadences.items():
        if cron in cadence.crons:
            return name
    known = [cron for cadence in fleet.cadences.values() for cron in cadence.crons]
    raise UsageError(f"cron '{cron}' belongs to no cadence of the registry{suggestion(cron, known)}")
