"""Compose the plan: estimates, split files, shard counts, division, pools; one entry for every faulty file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from miles_ci.declare.model import IMPLICIT_SUITE
from miles_ci.errors import UsageError, suggestion
from miles_ci.plan.durations import Durations
from miles_ci.plan.estimate import Estimate, estimate
from miles_ci.plan.model import DECLARATION_ERROR, TEST, Plan, Shard, SuitePlan, Unit
from miles_ci.plan.shard import Division, divide, shard_count
from miles_ci.plan.slots import area
from miles_ci.plan.split import groups_of, split, splittable
from miles_ci.registry.model import Fleet
from miles_ci.select.registrations import Catalog, Fault
from miles_ci.select.selection import Excluded, Included, Selection

MIN_TIMEOUT_S = 300


@dataclass(frozen=True)
class PlanOptions:
    """`shards` fixes the number of shards of a suite, where fewer tests than that leave the last ones out;
    `suites` restricts the plan (empty: all suites)."""

    shards: Mapping[str, int]
    suites: tuple[str, ...] = ()
    source: str | None = None
    affected: str | None = None


def build_plan(
    catalog: Catalog, fleet: Fleet, selection: Selection, durations: Durations, options: PlanOptions | None = None
) -> Plan:
    """The plan of a selection. Raises `UsageError` for an unknown suite in the options."""
    chosen = options or PlanOptions({})
    for name in (*chosen.suites, *chosen.shards):
        if name not in fleet.suites:
            raise UsageError(f"suite '{name}' is not known{suggestion(name, fleet.suites)}")
    by_suite: dict[str, list[Included]] = {name: [] for name in fleet.suites}
    for item in selection.included:
        by_suite[item.registration.suite].append(item)
    dropped: dict[str, list[Excluded]] = {name: [] for name in fleet.suites}
    for out in selection.excluded:
        if not isinstance(out.item, Fault):
            dropped[out.item.suite].append(out)
    summaries: list[SuitePlan] = []
    shards: list[Shard] = []
    for suite_id in fleet.suites:
        if chosen.suites and suite_id not in chosen.suites:
            continue
        faults = selection.faults if suite_id == IMPLICIT_SUITE else ()
        planner = _SuitePlanner(fleet, suite_id, durations, catalog)
        summary, made = planner.plan(by_suite[suite_id], faults, dropped[suite_id], chosen.shards.get(suite_id))
        summaries.append(summary)
        shards.extend(made)
    return Plan(
        cadence=selection.policy.cadence,
        labels=selection.policy.labels,
        bypass_fastfail=selection.policy.bypass_fastfail,
        write_baseline=selection.policy.write_baseline,
        source=chosen.source,
        affected=chosen.affected,
        suites=tuple(summaries),
        shards=tuple(shards),
        excluded=tuple(_excluded(item) for item in selection.excluded),
        warnings=selection.warnings,
    )


def _excluded(item: Excluded) -> tuple[str, str | None, tuple[str, ...]]:
    suite = None if isinstance(item.item, Fault) else item.item.suite
    return item.item.path, suite, tuple(reason.code for reason in item.reasons)


@dataclass(frozen=True, slots=True)
class _Job:
    """A unit as the divider sees it."""

    unit: Unit
    split: bool = False

    @property
    def id(self) -> str:
        return self.unit.id

    @property
    def ms(self) -> int:
        return self.unit.ms

    @property
    def devices(self) -> int:
        return max(1, self.unit.devices)

    @property
    def serial(self) -> bool:
        return self.unit.serial


class _SuitePlanner:
    def __init__(self, fleet: Fleet, suite_id: str, durations: Durations, catalog: Catalog) -> None:
        self.fleet = fleet
        self.suite_id = suite_id
        self.suite = fleet.suites[suite_id]
        self.durations = durations
        self.catalog = catalog

    def plan(
        self, included: list[Included], faults: tuple[Fault, ...], dropped: list[Excluded], forced: int | None
    ) -> tuple[SuitePlan, list[Shard]]:
        shards: list[Shard] = []
        makespan = bound = 0
        # Tests that may use different pools cannot share a runner blindly: each pool set is divided by itself.
        pool_sets = sorted({item.pools for item in included})
        parts: list[tuple[tuple[str, ...], Division[_Job], int]] = []
        room = self.suite.max_shards - len(pool_sets)
        for pools in pool_sets:
            group = [item for item in included if item.pools == pools]
            division, width = self._divide(group, pools, forced, 1 + max(room, 0))
            room -= max(len(division.shards) - 1, 0)
            parts.append((pools, division, width))
            makespan, bound = max(makespan, division.makespan), max(bound, division.lower_bound)
        made = sum(len(division.shards) for _, division, _ in parts) or (1 if faults else 0)
        # Jobs that were started for a fixed number of shards keep their numbers; those without a test are not listed.
        total = max(made, forced or 0)
        failed = tuple(self._fault_unit(fault) for fault in faults)
        for pools, division, width in parts:
            for group_jobs, load in zip(division.shards, division.loads, strict=True):
                units = tuple(job.unit for job in group_jobs)
                first = failed if not shards else ()
                shards.append(self._shard(len(shards) + 1, total, pools, width, load, first + units))
        if failed and not shards:
            shards.append(self._shard(1, total, (), self.fleet.width(self.suite_id), 0, failed))
        summary = SuitePlan(
            suite=self.suite_id,
            backend=self.suite.backend,
            selected=len(included) + len(failed),
            shards=len(shards),
            reason=None if shards else self._why_empty(dropped),
            makespan_ms=makespan,
            lower_bound_ms=bound,
            ratio=round(makespan / bound, 4) if bound else 1.0,
            target_wall_ms=self.suite.target_wall_s * 1000,
            setup_ms=self.suite.setup_seconds * 1000,
            over_target=tuple(
                unit.id for shard in shards for unit in shard.units if unit.ms > self.suite.target_wall_s * 1000
            ),
        )
        return summary, shards

    def _why_empty(self, dropped: list[Excluded]) -> str:
        if not dropped:
            return "no test is registered in this suite"
        counts: dict[str, int] = {}
        for item in dropped:
            counts[item.reasons[0].code] = counts.get(item.reasons[0].code, 0) + 1
        told = ", ".join(
            f"{count} {code}" for code, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        )
        first = dropped[0].reasons[0].text
        return f"all {len(dropped)} tests are excluded: {told} (first: {first})"

    def _divide(
        self, group: list[Included], pools: tuple[str, ...], forced: int | None, max_shards: int
    ) -> tuple[Division[_Job], int]:
        """Shards for tests that may use the same pools, and the devices of their runner."""
        if pools:
            width = min(self.fleet.pools[name].gpus_per_runner for name in pools)
            slots: int | None = sum(self.fleet.pools[name].count for name in pools)
        else:
            width, slots = self.fleet.width(self.suite_id), None
        estimates = self._estimates(group, pools)
        jobs = [
            _Job(self._unit(item, estimates[item.registration.path]), item.registration.declaration.split)
            for item in group
        ]
        pieces = {job.id: self._pieces(job, pools) for job in jobs}
        count = forced or shard_count(
            jobs,
            width=width,
            target_ms=self.suite.target_wall_s * 1000,
            setup_ms=self.suite.setup_seconds * 1000,
            min_shards=self.suite.min_shards,
            max_shards=max_shards,
            slots=slots,
            units=sum(pieces.values()),
        )
        fair = max(1, -(-area(jobs, width) // (count * width))) if jobs else 1
        final: list[_Job] = []
        for job in jobs:
            parts = min(count, pieces[job.id], -(-job.ms // fair)) if pieces[job.id] > 1 else 1
            final.extend(self._parts(job, pools, parts) if parts > 1 else [job])
        return divide(final, width=width, shards=count), width

    def _estimates(self, group: list[Included], pools: tuple[str, ...]) -> dict[str, Estimate]:
        return estimate((item.registration for item in group), self.durations, self._hardware(pools))

    def _hardware(self, pools: tuple[str, ...]) -> str:
        return self.fleet.pools[pools[0]].hardware if pools else self.suite.hardware[0]

    def _items(self, job: _Job, pools: tuple[str, ...]) -> Mapping[str, int | None]:
        learned = self.durations.get(job.unit.path, self.suite_id, self._hardware(pools))
        return learned.items if learned is not None else {}

    def _pieces(self, job: _Job, pools: tuple[str, ...]) -> int:
        """How many parts a test could form; a bound reads a whole file's metrics, so a file with one stays whole."""
        if not (job.split and self.suite.split) or job.unit.metric_bounds or job.serial:
            return 1
        items = self._items(job, pools)
        return len(groups_of(items)) if splittable(items) else 1

    def _parts(self, job: _Job, pools: tuple[str, ...], count: int) -> list[_Job]:
        parts = split(self._items(job, pools), count)
        return [
            replace(
                job,
                unit=replace(
                    job.unit,
                    id=f"{job.unit.path}#{part.index}/{len(parts)}",
                    ms=part.ms,
                    nodes=part.nodes,
                    deselect=part.deselect,
                ),
            )
            for part in parts
        ]

    def _unit(self, item: Included, estimated: Estimate) -> Unit:
        registration, declaration = item.registration, item.registration.declaration
        wanted = declaration.timeout if declaration.timeout is not None else max(3 * estimated.ms / 1000, MIN_TIMEOUT_S)
        return Unit(
            id=registration.path,
            path=registration.path,
            suite=self.suite_id,
            kind=TEST,
            ms=estimated.ms,
            est_source=estimated.source,
            devices=registration.num_gpus,
            timeout_s=max(1, min(-int(-wanted // 1), self.suite.test_timeout_s)),
            serial=declaration.serial,
            unstable=item.unstable,
            notify=item.notify,
            min_memory_gib=declaration.min_memory_gib,
            capabilities=declaration.capabilities,
            allow_all_skipped=declaration.allow_all_skipped,
            allow_never_executed=declaration.allow_never_executed,
            metric_bounds=self.catalog.metric_bounds.get(registration.path, ()),
        )

    def _fault_unit(self, fault: Fault) -> Unit:
        return Unit(
            id=fault.id,
            path=fault.path,
            suite=self.suite_id,
            kind=DECLARATION_ERROR,
            ms=1,
            est_source="none",
            devices=0,
            timeout_s=1,
            errors=tuple(error.text() for error in fault.errors),
        )

    def _shard(
        self, index: int, count: int, pools: tuple[str, ...], width: int, load: int, units: tuple[Unit, ...]
    ) -> Shard:
        """Shards are dealt to the pools in turn, each pool getting its share of runners."""
        pool = None
        if pools:
            turns = [name for name in pools for _ in range(self.fleet.pools[name].count)]
            pool = turns[(index - 1) % len(turns)]
        return Shard(
            suite=self.suite_id,
            index=index,
            count=count,
            backend=self.suite.backend,
            hardware=self._hardware((pool,) if pool else ()),
            pool=pool,
            runs_on=tuple(self.fleet.pools[pool].labels if pool else self.suite.runs_on),
            width=width,
            load_ms=load,
            timeout_s=self.suite.timeout_s,
            units=units,
        )
