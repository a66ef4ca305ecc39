"""Joins the results of all shards of a plan and proves that every planned test was observed.

Never executed = planned and not observed; a file of which `--file` ran some nodes only is not observed, and an item
that pytest made and did not run is never executed though its file was. Also errors: a result
nobody planned, two results for one unit, a result of another plan, and an empty observed set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miles_ci.errors import ExitCode, combine_exit_codes
from miles_ci.plan.model import Plan
from miles_ci.run import results
from miles_ci.run.results import ShardResults


@dataclass(frozen=True)
class Merged:
    """`never_executed`: planned units without an observation, and single items that did not run, with the reason. `faults`: what else is wrong, one sentence each.
    `skipped`: suites that were not started, with the reason given by the caller."""

    shards: tuple[ShardResults, ...]
    planned: int
    observed: int
    never_executed: tuple[str, ...]
    faults: tuple[str, ...]
    skipped: Mapping[str, str]

    def exit_code(self) -> int:
        codes = [results.exit_code_of(self.shards)]
        if self.never_executed or self.faults:
            codes.append(ExitCode.NEVER_EXECUTED)
        return combine_exit_codes(codes)

    def as_json(self) -> dict[str, object]:
        return {
            "schema": results.SCHEMA,
            "exit_code": self.exit_code(),
            "planned": self.planned,
            "observed": self.observed,
            "never_executed": list(self.never_executed),
            "faults": list(self.faults),
            "skipped_suites": dict(self.skipped),
            "counts": {
                name: sum(test.outcome == name for shard in self.shards for test in shard.tests)
                for name in results.OUTCOMES
            },
            "shards": [shard.as_json() for shard in self.shards],
        }


def merge(
    plan: Plan,
    shards: Iterable[ShardResults],
    *,
    skipped: Mapping[str, str] | None = None,
    suites: Sequence[str] | None = None,
) -> Merged:
    """Compare with the plan. `skipped`: suites whose jobs did not start, e.g. because what they need failed.
    `suites`: look at these only. A unit that a shard reports as not_run or cancelled is accounted for (its reason
    stands there, and it fails the run by itself) but not observed."""
    excused = dict(skipped or {})
    wanted = None if suites is None else set(suites)
    faults = [f"suite {name} is reported as skipped ({why}), but the plan has no such suite" for name, why in excused.items()
              if name not in {item.suite for item in plan.suites}]  # fmt: skip
    planned = {
        (shard.suite, unit.id): f"{shard.index}/{shard.count}"
        for shard in plan.shards
        if shard.suite not in excused and (wanted is None or shard.suite in wanted)
        for unit in shard.units
    }
    taken: list[ShardResults] = []
    seen: dict[tuple[str, str], str] = {}
    for shard in shards:
        if wanted is not None and shard.info.suite not in wanted:
            continue
        taken.append(shard)
        where = f"{shard.info.suite} shard {shard.info.shard}"
        if shard.info.plan_digest != plan.digest:
            faults.append(f"{where}: results of plan {shard.info.plan_digest[:16]}, expected {plan.digest[:16]}")
        if shard.status == "running":
            faults.append(f"{where}: {results.DIED}")
        faults.extend(_take(shard, where, planned, seen))
    never_executed = sorted(
        f"{suite}: {unit} (shard {planned[suite, unit]})" for suite, unit in planned.keys() - seen.keys()
    )
    never_executed += sorted(
        f"{shard.info.suite}: {node} ({who})"
        for shard in taken
        for test in shard.tests
        for node, who in test.never_executed.items()
    )
    observed = sum(
        (shard.info.suite, test.unit) in planned
        and test.outcome not in (results.NOT_RUN, results.CANCELLED)
        and not test.only
        for shard in taken
        for test in shard.tests
    )
    if planned and not seen:
        faults.append("nothing was observed: no shard delivered a single result")
    if planned and seen and not observed:
        faults.append("nothing was observed: no planned test ran")
    return Merged(tuple(taken), len(planned), observed, tuple(never_executed), tuple(faults), excused)


def _take(
    shard: ShardResults, where: str, planned: Mapping[tuple[str, str], str], seen: dict[tuple[str, str], str]
) -> list[str]:
    faults = []
    for test in shard.tests:
        key = (shard.info.suite, test.unit)
        if key not in planned:
            faults.append(f"{where}: {test.unit} was not planned there")
        elif test.only:
            faults.append(f"{where}: of {test.unit} only {', '.join(test.only)} was to run (--file)")
        elif key in seen:
            faults.append(f"{where}: {test.unit} has a second result, the first is from {seen[key]}")
        elif planned[key] != shard.info.shard:
            faults.append(f"{where}: {test.unit} belongs to shard {planned[key]}")
            seen[key] = where
        else:
            seen[key] = where
    return faults


def text(merged: Merged) -> str:
    lines = [f"NEVER RUN    {name}" for name in merged.never_executed]
    lines += [f"FAULT        {fault}" for fault in merged.faults]
    lines += [f"SKIPPED      suite {name}: {why}" for name, why in merged.skipped.items()]
    lines += [
        f"LEFT OUT     {shard.info.suite}: {node} ({why})"
        for shard in merged.shards
        for test in shard.tests
        for node, why in test.allowed.items()
    ]
    lines.append(f"planned {merged.planned}, observed {merged.observed}, never executed {len(merged.never_executed)}")
    return "\n".join(lines)
