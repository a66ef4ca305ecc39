"""Show suites, or with --suite the tests of one suite: machines, estimates, switches.

`--label` and `--hardware` narrow the tests; nothing is filtered by cadence here (see `plan`, `explain`).
"""

from __future__ import annotations

import argparse
from typing import Any

from miles_ci.commands.options import add_workspace, workspace
from miles_ci.commands.output import print_json, print_table, seconds
from miles_ci.errors import ExitCode, UsageError, suggestion
from miles_ci.plan.estimate import estimate
from miles_ci.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    parser.add_argument("--suite", help="list the tests of this suite")
    parser.add_argument("--tests", action="store_true", help="list the tests of all suites")
    parser.add_argument("--label", help="only tests that carry this domain label")
    parser.add_argument("--hardware", help="only suites on this model or architecture")


def main(args: argparse.Namespace) -> int:
    space = workspace(args)
    fleet = space.fleet
    for value, known, option in (
        (args.suite, fleet.suites, "--suite"),
        (args.label, fleet.labels.domain, "--label"),
        (args.hardware, fleet.hardware_names(), "--hardware"),
    ):
        if value is not None and value not in known:
            raise UsageError(f"{option} {value}: not known{suggestion(value, known)}")
    tests = _tests(space, args)
    if args.suite or args.tests or args.label:
        _print_tests(tests, args.format)
    else:
        _print_suites(space, tests, args)
    return ExitCode.OK


def _tests(space: Workspace, args: argparse.Namespace) -> list[dict[str, Any]]:
    fleet = space.fleet
    by_suite: dict[str, list[Any]] = {}
    for item in space.catalog.registrations:
        by_suite.setdefault(item.suite, []).append(item)
    rows: list[dict[str, Any]] = []
    for suite_id, items in by_suite.items():
        suite = fleet.suites[suite_id]
        if args.suite not in (None, suite_id):
            continue
        if args.hardware and not set(fleet.models_of(args.hardware)) & set(suite.hardware):
            continue
        estimates = estimate(items, space.durations, suite.hardware[0])
        for item in items:
            if args.label is not None and args.label not in item.labels:
                continue
            declaration = item.declaration
            switch = "disabled" if declaration.disabled else "unstable" if declaration.unstable else ""
            rows.append(
                {
                    "path": item.path,
                    "suite": suite_id,
                    "gpus": item.num_gpus,
                    "est_ms": estimates[item.path].ms,
                    "est_source": estimates[item.path].source,
                    "labels": list(item.labels),
                    "nightly": declaration.nightly,
                    "switch": switch,
                }
            )
    return rows


def _print_tests(tests: list[dict[str, Any]], form: str) -> None:
    if form == "json":
        print_json({"tests": tests})
        return
    rows = [
        (
            test["path"],
            test["suite"],
            test["gpus"] or "-",
            seconds(test["est_ms"]),
            test["est_source"],
            ",".join(test["labels"]) or "-",
            " ".join(filter(None, ("nightly" if test["nightly"] else "", test["switch"]))) or "-",
        )
        for test in tests
    ]
    print_table(("test", "suite", "gpus", "estimate", "from", "labels", "switches"), rows, right=(2, 3))
    print(f"{len(tests)} test(s)")


def _print_suites(space: Workspace, tests: list[dict[str, Any]], args: argparse.Namespace) -> None:
    fleet = space.fleet
    counts: dict[str, list[int]] = {}
    for test in tests:
        entry = counts.setdefault(test["suite"], [0, 0])
        entry[0] += 1
        entry[1] += test["est_ms"]
    suites: list[dict[str, Any]] = []
    for suite_id, suite in fleet.suites.items():
        if args.hardware and not set(fleet.models_of(args.hardware)) & set(suite.hardware):
            continue
        count, total = counts.get(suite_id, [0, 0])
        slots = fleet.runner_slots(suite_id)
        suites.append(
            {
                "suite": suite_id,
                "tier": suite.tier,
                "backend": suite.backend,
                "hardware": list(suite.hardware),
                "gpus": suite.gpus,
                "machines": list(suite.pools) or list(suite.runs_on),
                "runners": slots,
                "needs": suite.needs,
                "tests": count,
                "total_est_ms": total,
            }
        )
    faults = [fault.path for fault in space.catalog.faults]
    if args.format == "json":
        print_json({"suites": suites, "faulty": faults})
        return
    rows = [
        (
            item["suite"],
            item["backend"],
            ",".join(item["hardware"]),
            item["gpus"] or "-",
            ",".join(item["machines"]),
            "hosted" if item["runners"] is None else item["runners"] or "disabled",
            item["needs"] or "-",
            item["tests"],
            seconds(item["total_est_ms"]) if item["tests"] else "-",
        )
        for item in suites
    ]
    headers = ("suite", "backend", "hardware", "gpus", "machines", "runners", "needs", "tests", "total estimate")
    print_table(headers, rows, right=(3, 5, 7, 8))
    if faults:
        print(f"{len(faults)} file(s) with declaration errors (see `miles-ci lint`): {', '.join(faults[:5])}")
