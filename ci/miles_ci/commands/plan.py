"""Select tests and divide them into shards; print the plan, or write it for the shards to run.

miles-ci plan                                       what a pull request without labels would run
miles-ci plan --suite stage-a-cpu                   one suite, with the tests of each shard
miles-ci plan --cadence nightly --out plan.json     plan once; shards verify its digest
"""

from __future__ import annotations

import argparse
from pathlib import Path

from miles_ci.commands.options import add_selection, add_workspace, selection_of, workspace
from miles_ci.commands.output import print_json, print_table, seconds
from miles_ci.errors import ExitCode, UsageError
from miles_ci.plan.build import PlanOptions, build_plan
from miles_ci.plan.model import DECLARATION_ERROR, Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    add_selection(parser)
    parser.add_argument("--suite", action="append", default=[], help="plan only this suite (repeatable)")
    parser.add_argument("--shards", type=int, metavar="N", help="divide each planned suite into N shards")
    parser.add_argument("--source", metavar="SHA", help="commit that is planned, recorded in the plan")
    parser.add_argument("--out", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--github-output", metavar="FILE", help="append the outputs of the plan job")
    parser.add_argument("--tests", action="store_true", help="list the tests of each shard (default with --suite)")


def main(args: argparse.Namespace) -> int:
    plan = plan_from(args)
    if args.out:
        plan.save(Path(args.out))
    if args.github_output:
        with open(args.github_output, "a", encoding="utf-8") as stream:
            stream.writelines(f"{name}={value}\n" for name, value in plan.outputs().items())
    if args.format == "json":
        print_json(plan.as_json())
    else:
        _print(plan, tests=args.tests or bool(args.suite))
    return ExitCode.OK


def plan_from(args: argparse.Namespace) -> Plan:
    """The plan that the options ask for."""
    if args.shards is not None and not 1 <= args.shards <= 256:
        raise UsageError(f"--shards {args.shards}: must be between 1 and 256")
    space = workspace(args)
    selection, affected = selection_of(args, space)
    suites = tuple(args.suite)
    forced = dict.fromkeys(suites or space.fleet.suites, args.shards) if args.shards else {}
    options = PlanOptions(
        shards=forced, suites=suites, source=args.source, affected=affected.reason if affected is not None else None
    )
    return build_plan(space.catalog, space.fleet, selection, space.durations, options)


def _print(plan: Plan, *, tests: bool) -> None:
    print(f"cadence {plan.cadence}, labels: {', '.join(plan.labels) or 'none'}, digest {plan.digest[:16]}")
    if plan.affected is not None:
        print(f"affected: {plan.affected}")
    rows = []
    for item in plan.suites:
        rows.append(
            (
                item.suite,
                item.selected,
                item.shards,
                seconds(item.makespan_ms) if item.shards else "-",
                seconds(item.lower_bound_ms) if item.shards else "-",
                f"{item.ratio:.3f}" if item.shards else "-",
                item.reason or "",
            )
        )
    print_table(("suite", "tests", "shards", "longest", "bound", "ratio", "note"), rows, right=(1, 2, 3, 4, 5))
    for item in plan.suites:
        for name in item.over_target:
            print(f"over target: {name} alone takes longer than {item.suite}'s {seconds(item.target_wall_ms)}")
    if tests:
        for shard in plan.shards:
            where = shard.pool or ",".join(shard.runs_on)
            print(f"\n{shard.suite} shard {shard.index}/{shard.count} on {where}: {seconds(shard.load_ms)}")
            for unit in shard.units:
                note = (
                    "  declaration error" if unit.kind == DECLARATION_ERROR else "  unstable" if unit.unstable else ""
                )
                size = f"  {unit.devices} gpu" if unit.devices else ""
                print(f"  {unit.id}  {seconds(unit.ms)} ({unit.est_source}){size}{note}")
    excluded = len(plan.excluded)
    if excluded:
        print(f"{excluded} registration(s) excluded; `miles-ci explain` tells why")
    for warning in plan.warnings:
        print(f"warning: {warning}")
