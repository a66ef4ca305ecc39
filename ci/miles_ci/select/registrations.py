"""Declarations checked against the fleet: the tests that exist, and the files that are faulty.

A file with any error is one `Fault` and none of its registrations exists; all other files are untouched.
Findings about dates that have passed do not make a file faulty: they are for lint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import date

from miles_ci.declare.model import Declaration, Scan
from miles_ci.errors import Diagnostic, suggestion
from miles_ci.metric_bound import MetricBound
from miles_ci.registry.dates import until_problem
from miles_ci.registry.model import Fleet

Observed = Callable[[str, str], bool]
"""(path, suite) -> whether enough durations are known to do without `est_time`."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One test file in one suite. `num_gpus` is resolved; `home` is False where `arches: all` sent it."""

    declaration: Declaration
    suite: str
    num_gpus: int
    home: bool = True

    @property
    def id(self) -> str:
        return f"{self.suite}:{self.path}"

    @property
    def path(self) -> str:
        return self.declaration.path

    @property
    def backend(self) -> str:
        return self.declaration.backend

    @property
    def labels(self) -> tuple[str, ...]:
        return self.declaration.labels


@dataclass(frozen=True, slots=True)
class Fault:
    """A file whose declarations cannot be trusted: one failed entry in the first CPU suite."""

    path: str
    errors: tuple[Diagnostic, ...]

    @property
    def id(self) -> str:
        return f"declaration::{self.path}"


@dataclass(frozen=True)
class Catalog:
    """All tests of a tree as the fleet sees them, sorted by path and suite."""

    registrations: tuple[Registration, ...]
    faults: tuple[Fault, ...]
    metric_bounds: dict[str, tuple[MetricBound, ...]]
    findings: tuple[Diagnostic, ...]

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Errors that make files faulty."""
        return tuple(error for fault in self.faults for error in fault.errors)


def build_catalog(scan: Scan, fleet: Fleet, *, observed: Observed | None = None, today: date | None = None) -> Catalog:
    """Check every declaration of a scan; never raises for their content."""
    checker = _Checker(fleet, observed or (lambda path, suite: False), today or date.today())
    faulty: dict[str, list[Diagnostic]] = {}
    for error in scan.errors:
        faulty.setdefault(error.path, []).append(error)
    sound: list[Registration] = []
    for declaration in scan.declarations:
        if declaration.implicit:
            if declaration.suite in fleet.suites:
                sound.append(Registration(declaration, declaration.suite, 0))
            else:
                message = f"suite: '{declaration.suite}', the suite of tests/fast, is missing in the registry"
                faulty.setdefault(declaration.path, []).append(
                    Diagnostic(declaration.path, 1, 1, "unknown-suite", message)
                )
            continue
        errors = checker.check(declaration)
        if errors:
            faulty.setdefault(declaration.path, []).extend(errors)
        else:
            gpus = 0 if declaration.backend == "cpu" else (declaration.num_gpus or fleet.suites[declaration.suite].gpus)
            sound.append(Registration(declaration, declaration.suite, gpus))
    metric_bounds: dict[str, list[MetricBound]] = {}
    for bound in scan.metric_bounds:
        if bound.path not in faulty:
            metric_bounds.setdefault(bound.path, []).append(bound)
    kept = (item for item in sound if item.path not in faulty)
    return Catalog(
        tuple(sorted(kept, key=lambda item: (item.path, item.suite))),
        tuple(Fault(path, tuple(sorted(errors))) for path, errors in sorted(faulty.items())),
        {path: tuple(items) for path, items in metric_bounds.items()},
        tuple(sorted(checker.findings)),
    )


def eligible_models(fleet: Fleet, declaration: Declaration, suite_id: str) -> tuple[str, ...]:
    """Models of the suite that the declaration names, in the declaration's order of preference."""
    named = [model for name in declaration.hardware for model in fleet.models_of(name)]
    return tuple(dict.fromkeys(model for model in named if model in fleet.suites[suite_id].hardware))


def eligible_pools(fleet: Fleet, declaration: Declaration, suite_id: str) -> tuple[str, ...]:
    """Pools of the suite, enabled or not, whose machines meet every need of the declaration."""
    models = eligible_models(fleet, declaration, suite_id)
    needs = set(declaration.capabilities)
    memory = declaration.min_memory_gib or 0
    return tuple(
        name
        for name, pool in fleet.fitting_pools(suite_id).items()
        if pool.hardware in models
        and fleet.hardware[pool.hardware].memory_gib >= memory
        and needs <= fleet.capabilities(name)
    )


class _Checker:
    """The rules that need the fleet."""

    def __init__(self, fleet: Fleet, observed: Observed, today: date) -> None:
        self.fleet = fleet
        self.observed = observed
        self.today = today
        self.findings: list[Diagnostic] = []
        self.hardware_names = fleet.hardware_names()
        self.capability_names = sorted(
            {item for hardware in fleet.hardware.values() for item in hardware.capabilities}
            | {item for pool in fleet.pools.values() for item in pool.capabilities}
        )

    def check(self, declaration: Declaration) -> list[Diagnostic]:
        errors: list[Diagnostic] = []

        def error(field: str, code: str, message: str) -> None:
            line, column = declaration.place(field)
            errors.append(Diagnostic(declaration.path, line, column, code, message))

        suite_known = self._suite(declaration, error)
        self._labels(declaration, error)
        self._dates(declaration, errors)
        if declaration.backend != "cpu":
            hardware_known = self._hardware_names(declaration, error)
            self._unknown(declaration.capabilities, self.capability_names, "capabilities", "capability", error)
            if suite_known and hardware_known:
                self._machines(declaration, error)
        return errors

    def _suite(self, declaration: Declaration, error: Callable[[str, str, str], None]) -> bool:
        suite = self.fleet.suites.get(declaration.suite)
        if suite is None:
            near = suggestion(declaration.suite, self.fleet.suites)
            error("suite", "unknown-suite", f"suite: '{declaration.suite}' is not known{near}")
            return False
        if suite.backend != declaration.backend:
            message = (
                f"suite: '{declaration.suite}' is a {suite.backend} suite, the call registers for {declaration.backend}"
            )
            error("suite", "wrong-backend", message)
            return False
        if declaration.est_time is None and not self.observed(declaration.path, declaration.suite):
            error("est_time", "missing-field", "est_time is required until 3 durations of this test are known")
        if declaration.split and not suite.split:
            error("split", "split-refused", f"split: suite '{declaration.suite}' does not split files (suites.*.split)")
        if declaration.timeout is not None and declaration.timeout > suite.test_timeout_s:
            message = f"timeout: {declaration.timeout:g} s exceeds test_timeout_s {suite.test_timeout_s} of the suite"
            error("timeout", "out-of-range", message)
        self._estimate(declaration, suite.test_timeout_s, error)
        return True

    @staticmethod
    def _estimate(declaration: Declaration, limit: int, error: Callable[[str, str, str], None]) -> None:
        """A test that takes as long as it says must be able to end."""
        estimate, timeout = declaration.est_time, declaration.timeout
        if estimate is not None and estimate > limit:
            message = f"est_time: {estimate:g} s exceeds test_timeout_s {limit} of the suite, which would end the test"
            error("est_time", "out-of-range", message)
        elif estimate is not None and timeout is not None and estimate > timeout:
            message = f"timeout: {timeout:g} s is less than est_time {estimate:g} s, so the test could not end"
            error("timeout", "out-of-range", message)

    def _labels(self, declaration: Declaration, error: Callable[[str, str, str], None]) -> None:
        labels = self.fleet.labels
        for label in declaration.labels:
            if label in labels.scope or label in labels.behaviour:
                kind = "scope" if label in labels.scope else "behaviour"
                error(
                    "labels", "wrong-label-kind", f"labels: '{label}' is a {kind} label; tests carry domain labels only"
                )
            elif label not in labels.domain:
                error("labels", "unknown-label", f"labels: '{label}' is not known{suggestion(label, labels.domain)}")
        if declaration.backend != "cpu" and not declaration.labels:
            error("labels", "missing-label", "labels: a GPU test needs at least one domain label")

    def _dates(self, declaration: Declaration, errors: list[Diagnostic]) -> None:
        for field in ("disabled", "unstable"):
            exemption = getattr(declaration, field)
            problem = until_problem(exemption.until, self.today) if exemption is not None else None
            if problem is None:
                continue
            code, message, severity = problem
            line, column = declaration.place(field)
            found = Diagnostic(declaration.path, line, column, code, f"{field}: until {message}", severity)
            (self.findings if code == "until-expired" else errors).append(found)

    def _hardware_names(self, declaration: Declaration, error: Callable[[str, str, str], None]) -> bool:
        return self._unknown(declaration.hardware, self.hardware_names, "hardware", "hardware", error)

    @staticmethod
    def _unknown(
        given: Collection[str], known: Collection[str], field: str, kind: str, error: Callable[[str, str, str], None]
    ) -> bool:
        unknown = [name for name in given if name not in known]
        for name in unknown:
            error(field, f"unknown-{kind}", f"{field}: '{name}' is not known{suggestion(name, known)}")
        return not unknown

    def _machines(self, declaration: Declaration, error: Callable[[str, str, str], None]) -> None:
        fleet, suite_id = self.fleet, declaration.suite
        suite = fleet.suites[suite_id]
        models = eligible_models(fleet, declaration, suite_id)
        uncovered = [model for model in suite.hardware if model not in models]
        if uncovered:
            message = f"hardware: does not cover {', '.join(uncovered)}, on which '{suite_id}' runs"
            error("hardware", "hardware-not-covered", message)
            return
        if declaration.num_gpus is not None and declaration.num_gpus > suite.gpus:
            message = f"num_gpus: {declaration.num_gpus} is more than the {suite.gpus} of suite '{suite_id}'"
            error("num_gpus", "too-many-gpus", message)
        largest = max((fleet.hardware[model].memory_gib for model in models), default=0)
        if declaration.min_memory_gib is not None and declaration.min_memory_gib > largest:
            message = f"min_memory_gib: {declaration.min_memory_gib:g} is more than any eligible model has ({largest})"
            error("min_memory_gib", "too-much-memory", message)
        elif set(declaration.capabilities) <= set(self.capability_names) and not eligible_pools(
            fleet, declaration, suite_id
        ):
            message = f"capabilities: no pool of '{suite_id}' offers {', '.join(declaration.capabilities)}"
            error("capabilities", "unmet-capability", message)
