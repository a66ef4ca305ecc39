"""Learn durations and keep estimates true.

miles-ci tune --history sqlite:/var/lib/miles-ci/history.db     update tests/durations.json from the store
miles-ci tune --results results artifacts/*                     the same from result files, or folders that hold them
miles-ci tune --report                                          how far declared estimates are off
miles-ci tune --source                                          rewrite est_time where it is off by > 1.5
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from miles_ci.commands.options import add_workspace, workspace
from miles_ci.commands.output import print_json, print_table, seconds
from miles_ci.environment import read
from miles_ci.errors import ExitCode, UsageError
from miles_ci.plan.durations import MAX_AGE_DAYS, WINDOW, Durations, Key, Learned, learn
from miles_ci.plan.tune import (
    apply_rewrites,
    drifts,
    learned_of_history,
    merge,
    observations_of_results,
    placeholders,
    prune,
    rewrites,
)
from miles_ci.report.results import find_results
from miles_ci.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    parser.add_argument(
        "--results", nargs="+", metavar="PLACE", default=[], help="results.json files, or folders, to learn from"
    )
    parser.add_argument("--history", metavar="URL", help="history store to learn from (default: MILES_CI_HISTORY_URL)")
    parser.add_argument("--report", action="store_true", help="print drift and placeholder estimates; changes nothing")
    parser.add_argument("--source", action="store_true", help="rewrite est_time literals in the test files")
    parser.add_argument("--all", action="store_true", help="with --report: also tests whose estimate is good")


def main(args: argparse.Namespace) -> int:
    space = workspace(args)
    address = args.history or (None if args.report or args.source else read("MILES_CI_HISTORY_URL"))
    if not (args.results or address or args.report or args.source):
        raise UsageError(
            "tune: nothing to do: give --results, --history (or MILES_CI_HISTORY_URL), --report or --source"
        )
    table = space.durations
    if args.results or address:
        table, observed = _learn(space, table, args.results, address)
        said = f"{space.table}: {len(table.entries)} entries, {observed} of them observed now"
        if args.format == "text":
            print(said)
        elif not (args.report or args.source):
            print_json({"table": space.table, "entries": len(table.entries), "observed": observed})
        else:
            print(said, file=sys.stderr)
    if args.source:
        _rewrite(space, table, args.format)
    elif args.report:
        _report(space, table, args.format, show_all=args.all)
    return ExitCode.OK


def _learn(space: Workspace, table: Durations, results: list[str], address: str | None) -> tuple[Durations, int]:
    """Write the table; returns it and how many of its entries were observed now."""
    now = time.time()
    files = find_results(Path(name) for name in results)
    if results and not files:
        raise UsageError(f"--results {' '.join(results)}: no results.json there")
    found: dict[Key, Learned] = learn(observations_of_results(files), now)
    if address:
        from miles_ci.history.store import open_store

        store = open_store(address, create=False)
        try:
            passing = {
                model: store.passing_durations(hardware=model, since=now - MAX_AGE_DAYS * 86_400, limit=WINDOW)
                for model in space.fleet.hardware
            }
        finally:
            store.close()
        found = {
            **found,
            **learned_of_history(space.fleet, passing, datetime.fromtimestamp(now, timezone.utc).date().isoformat()),
        }
    merged = prune(merge(table, found), space.catalog)
    merged.save(space.root / space.table)
    return merged, len(merged.entries.keys() & found.keys())


def _rewrite(space: Workspace, table: Durations, form: str) -> None:
    changes = rewrites(space.root, space.catalog, space.fleet, table)
    changed = apply_rewrites(space.root, changes)
    rows = [(change.declaration.path, change.declaration.suite, change.old, change.new) for change in changes]
    if form == "json":
        print_json({"rewritten": [dict(zip(("path", "suite", "old", "new"), row, strict=True)) for row in rows]})
    elif rows:
        print_table(("test", "suite", "est_time before", "now"), rows, right=(2, 3))
    if form != "json":
        print(f"{len(rows)} estimate(s) rewritten in {len(changed)} file(s)")


def _report(space: Workspace, table: Durations, form: str, *, show_all: bool) -> None:
    found = drifts(space.catalog, space.fleet, table)
    shown = [drift for drift in found if show_all or drift.notable]
    holders = placeholders(space.catalog.registrations)
    total = len(space.catalog.registrations)
    declared = sum(item.declaration.est_time is not None for item in space.catalog.registrations)
    observed = sum(table.knows(item.path, item.suite) for item in space.catalog.registrations)
    if form == "json":
        print_json(
            {
                "tests": total,
                "declared": declared,
                "observed": observed,
                "drift": [
                    {
                        "path": drift.path,
                        "suite": drift.suite,
                        "hardware": drift.hardware,
                        "declared_ms": drift.declared_ms,
                        "observed_ms": drift.observed_ms,
                        "ratio": round(drift.ratio, 3),
                        "observations": drift.count,
                        "notable": drift.notable,
                    }
                    for drift in shown
                ],
                "placeholders": [
                    {"suite": item.suite, "est_time": item.est_time, "tests": item.tests, "of": item.total}
                    for item in holders
                ],
            }
        )
        return
    print(f"{total} tests: {declared} with a declared estimate, {observed} with learned durations")
    if shown:
        rows = [
            (d.path, d.suite, seconds(d.declared_ms), seconds(d.observed_ms), f"{d.ratio:.2f}", d.count) for d in shown
        ]
        print_table(("test", "suite", "declared", "observed", "ratio", "runs"), rows, right=(2, 3, 4, 5))
    else:
        print("no estimate is off by more than a factor of 2 and 10 s")
    for item in holders:
        share = 100 * item.tests / item.total
        print(
            f"warning: {item.suite}: {item.tests} of {item.total} tests ({share:.0f} %) declare {item.est_time:g} s: a placeholder"
        )
