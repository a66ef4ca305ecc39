"""Queue times and utilisation of the fleet under load, from the tests that exist and their estimates.

    miles-ci simulate --arrivals 6 --hours 168 --seeds 5

Pull requests arrive at random with random labels; nightly and weekly runs start by their crons.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from miles_ci.commands.options import add_workspace, workspace
from miles_ci.commands.output import print_json, print_table, seconds
from miles_ci.errors import ExitCode
from miles_ci.plan.build import build_plan
from miles_ci.plan.model import Plan
from miles_ci.plan.simulate import Load, SimulationReport, simulate
from miles_ci.select.policy import Policy
from miles_ci.select.selection import select


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    parser.add_argument(
        "--arrivals", type=float, default=4.0, metavar="N", help="pull-request runs per hour (default 4)"
    )
    parser.add_argument("--hours", type=float, default=168.0, help="simulated hours from Monday 00:00 (default 168)")
    parser.add_argument("--seeds", type=int, default=5, help="repetitions with different chance (default 5)")
    parser.add_argument(
        "--label-share", type=float, default=0.15, help="chance that a pull request asks for a label (default 0.15)"
    )


def main(args: argparse.Namespace) -> int:
    space = workspace(args)

    def plan_for(cadence: str, labels: tuple[str, ...]) -> Plan:
        policy = Policy.resolve(space.fleet, cadence, labels)
        selection = select(space.catalog, space.fleet, policy, today=space.today)
        return build_plan(space.catalog, space.fleet, selection, space.durations)

    load = Load(args.arrivals, args.hours, args.seeds, args.label_share)
    report = simulate(space.fleet, plan_for, load)
    if args.format == "json":
        print_json(asdict(report))
    else:
        _print(report)
    return ExitCode.OK


def _print(report: SimulationReport) -> None:
    load = report.load
    print(
        f"{load.arrivals_per_hour:g} pull-request runs per hour, {load.hours:g} h, {load.seeds} seeds, {report.runs} runs"
    )
    rows = [
        (
            pool.pool,
            pool.runners,
            pool.jobs,
            seconds(round(pool.wait_p50_s * 1000)),
            seconds(round(pool.wait_p95_s * 1000)),
            f"{100 * pool.utilisation:.1f} %",
        )
        for pool in report.pools
    ]
    if not rows:
        print("the registry has no pools, so nothing waits (hosted CPU runners are not counted)")
        return
    print_table(("pool", "runners", "jobs", "wait p50", "wait p95", "busy"), rows, right=(1, 2, 3, 4, 5))
    told = ", ".join(f"{cadence} {hours:.1f}" for cadence, hours in report.gpu_hours_per_week.items())
    print(f"GPU-hours per week: {told}")
    if report.pr_wall_p95_s:
        p50, p95 = (seconds(round(value * 1000)) for value in (report.pr_wall_p50_s, report.pr_wall_p95_s))
        print(f"a pull request with GPU tests: p50 {p50}, p95 {p95}")
