"""Apply policy, affected set and switches to a catalog: every registration is included or has its reasons.

Invariant: included + excluded = the catalog's registrations and faults, plus the placements that
`arches: all` adds; each appears exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from miles_ci.registry.model import Fleet, Suite
from miles_ci.select.affected import Affected
from miles_ci.select.policy import Policy
from miles_ci.select.registrations import Catalog, Fault, Registration, eligible_pools

CADENCE, LABEL, UNAFFECTED = "cadence", "label", "unaffected"
DISABLED_TEST, DISABLED_POOL, NO_HARDWARE = "disabled-test", "disabled-pool", "no-hardware"
DECLARATION_ERROR = "declaration-error"
REASONS = (DECLARATION_ERROR, CADENCE, LABEL, UNAFFECTED, DISABLED_TEST, DISABLED_POOL, NO_HARDWARE)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a test does not run. `keys` is a path in the registry, `field` a field of the test's declaration."""

    code: str
    text: str
    keys: tuple[str | int, ...] = ()
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Included:
    """A test that runs; `unstable` is the reason why its failure does not block, if so declared.

    `pools` can take it (none: hosted CPU)."""

    registration: Registration
    pools: tuple[str, ...]
    unstable: str | None = None
    notify: str | None = None


@dataclass(frozen=True, slots=True)
class Excluded:
    """A test that does not run, with every reason that applies, the deciding one first."""

    item: Registration | Fault
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Selection:
    """The outcome, in order of path and suite."""

    policy: Policy
    included: tuple[Included, ...]
    excluded: tuple[Excluded, ...]
    faults: tuple[Fault, ...]
    warnings: tuple[str, ...]

    def suite(self, suite_id: str) -> tuple[Included, ...]:
        return tuple(item for item in self.included if item.registration.suite == suite_id)


def select(
    catalog: Catalog, fleet: Fleet, policy: Policy, *, affected: Affected | None = None, today: date | None = None
) -> Selection:
    """Decide every registration. Without `affected` nothing counts as unaffected."""
    day = (today or date.today()).isoformat()
    included: list[Included] = []
    excluded: list[Excluded] = []
    warnings = list(policy.warnings)
    if affected is not None and affected.everything and policy.use_affected:
        warnings.append(f"everything counts as affected: {affected.reason}")
    candidates = list(catalog.registrations)
    if policy.arches == "all":
        candidates += _placements(catalog, fleet)
        candidates.sort(key=lambda item: (item.path, item.suite))
    for registration in candidates:
        reasons, pools = _reasons(registration, fleet, policy, affected)
        switch = _switches(registration, policy, day, warnings)
        if isinstance(switch, Reason):
            reasons.append(switch)
        if reasons:
            excluded.append(Excluded(registration, tuple(reasons)))
        else:
            unstable, notify = switch if isinstance(switch, tuple) else (None, None)
            included.append(Included(registration, pools, unstable, notify))
    for fault in catalog.faults:
        first = fault.errors[0]
        text = f"{len(fault.errors)} error(s) in the declaration, the first: {first.message}"
        excluded.append(Excluded(fault, (Reason(DECLARATION_ERROR, text),)))
    return Selection(policy, tuple(included), tuple(excluded), catalog.faults, tuple(warnings))


def _reasons(
    registration: Registration, fleet: Fleet, policy: Policy, affected: Affected | None
) -> tuple[list[Reason], tuple[str, ...]]:
    declaration, suite = registration.declaration, fleet.suites[registration.suite]
    reasons: list[Reason] = []
    if declaration.nightly and not policy.admit_nightly:
        text = f"nightly=True, and the {policy.cadence} cadence does not admit nightly tests"
        reasons.append(Reason(CADENCE, text, ("cadences", policy.cadence, "admit_nightly"), "nightly"))
    if not policy.admits_labels(declaration.labels, is_cpu=registration.backend == "cpu"):
        wanted = ", ".join(f"run-ci-{label}" for label in declaration.labels)
        text = f"none of its labels is included by {policy.scope}; asked for by {wanted or 'no label'}"
        reasons.append(Reason(LABEL, text, ("cadences", policy.cadence, "include"), "labels"))
    if _unaffected(registration, suite, policy, affected):
        keys = ("suites", registration.suite, "affected")
        reasons.append(Reason(UNAFFECTED, "no changed file reaches this test", keys))
    pools: tuple[str, ...] = ()
    if registration.backend != "cpu":
        meeting = eligible_pools(fleet, declaration, registration.suite)
        enabled = fleet.enabled_pools(registration.suite)
        pools = tuple(name for name in meeting if name in enabled)
        if not enabled:
            name, pool = next(iter(fleet.fitting_pools(registration.suite).items()))
            why = (
                f"pool {name} is disabled: {pool.disabled.reason}"
                if pool.disabled
                else f"no pool of {registration.suite}"
            )
            reasons.append(Reason(DISABLED_POOL, why, ("pools", name, "disabled")))
        elif not pools:
            off = [name for name in meeting if name not in enabled]
            if off:
                why = f"the only pools that meet its needs are disabled: {', '.join(off)}"
                reasons.append(Reason(DISABLED_POOL, why, ("pools", off[0], "disabled")))
            else:
                needs = ", ".join(declaration.capabilities) or "the memory it asks for"
                keys = ("suites", registration.suite, "pools")
                reasons.append(Reason(NO_HARDWARE, f"no pool of the suite offers {needs}", keys, "capabilities"))
    return reasons, pools


def _unaffected(registration: Registration, suite: Suite, policy: Policy, affected: Affected | None) -> bool:
    if affected is None or affected.everything or not policy.use_affected or not suite.affected:
        return False
    if policy.requested & set(registration.labels):
        return False
    return registration.path not in affected.tests


def _switches(
    registration: Registration, policy: Policy, day: str, warnings: list[str]
) -> Reason | tuple[str, str | None] | None:
    """What `disabled` and `unstable` make of a test: a reason, or (why it may fail, whom to notify)."""
    declaration = registration.declaration
    owner = declaration.owner or registration.suite
    place = f"{declaration.path}:{declaration.line}"
    if declaration.disabled is not None:
        expired = declaration.disabled.until < day
        if expired and policy.expired_runs:
            text = f"{owner}: disabled until {declaration.disabled.until} has passed, so it ran as unstable"
            return declaration.disabled.reason, text
        if expired:
            warnings.append(f"{place}: disabled until {declaration.disabled.until} has passed; still excluded")
        text = f"{declaration.disabled.reason} ({declaration.disabled.issue}, until {declaration.disabled.until})"
        return Reason(DISABLED_TEST, text, (), "disabled")
    if declaration.unstable is not None:
        expired = declaration.unstable.until < day
        if expired:
            warnings.append(f"{place}: unstable until {declaration.unstable.until} has passed")
        return (
            declaration.unstable.reason,
            f"{owner}: unstable until {declaration.unstable.until} has passed" if expired else None,
        )
    return None


def _placements(catalog: Catalog, fleet: Fleet) -> list[Registration]:
    """Where `arches: all` sends tests besides their home suite: one suite for each other declared arch."""
    declared = {(item.path, item.suite) for item in catalog.registrations}
    placed: list[Registration] = []
    for item in catalog.registrations:
        if item.backend == "cpu":
            continue
        home = {fleet.hardware[model].arch for model in fleet.suites[item.suite].hardware}
        models = [model for name in item.declaration.hardware for model in fleet.models_of(name)]
        for arch in dict.fromkeys(fleet.hardware[model].arch for model in models):
            if arch in home:
                continue
            suite_id = _suite_for_arch(fleet, item, arch)
            if suite_id is not None and (item.path, suite_id) not in declared:
                declared.add((item.path, suite_id))
                placed.append(Registration(item.declaration, suite_id, item.num_gpus, home=False))
    return placed


def _suite_for_arch(fleet: Fleet, item: Registration, arch: str) -> str | None:
    """The suite with the smallest `gpus` that fits; ties: fewest capabilities, then id."""
    best: tuple[int, int, str] | None = None
    for suite_id, suite in fleet.suites.items():
        if suite.backend != item.backend or suite.gpus < item.num_gpus:
            continue
        if any(fleet.hardware[model].arch != arch for model in suite.hardware):
            continue
        pools = eligible_pools(fleet, item.declaration, suite_id)
        if not pools:
            continue
        candidate = (suite.gpus, min(len(fleet.capabilities(pool)) for pool in pools), suite_id)
        if best is None or candidate < best:
            best = candidate
    return best[2] if best else None
