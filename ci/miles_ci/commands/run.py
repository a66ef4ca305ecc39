"""Run a suite, one shard of it, or single files: health checks, leases, time limits, retries, results.

miles-ci run --suite stage-a-cpu                          everything the suite holds, here
miles-ci run --suite stage-a-cpu --shard 1/2              the first of two shards, planned here
miles-ci run --suite stage-b-cpu --plan plan.json --shard 3/4
miles-ci run --suite stage-a-cpu --file tests/fast/ci/test_x.py

Without a plan, labels, cadence or change every label is admitted. Results (results.json, junit.xml, observed.json,
logs/) go to DIR/<suite>-<i>-of-<n>.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from miles_ci.commands.options import add_selection, add_workspace, repository_path, selection_of, workspace
from miles_ci.commands.output import print_json
from miles_ci.environment import read
from miles_ci.errors import ExitCode, PlanMismatch, UsageError, suggestion
from miles_ci.plan.build import PlanOptions, build_plan
from miles_ci.plan.model import Plan, Shard, Unit
from miles_ci.run import system
from miles_ci.run.from_plan import default_branch, only_files, parse_shard, run_info
from miles_ci.workspace import Workspace

if TYPE_CHECKING:
    from miles_ci.history.store import HistoryStore
    from miles_ci.run.devices.inventory import Device
    from miles_ci.run.shard import ShardJob

NIGHTLY_RERUNS = 3
MAX_RERUNS = 100
MAX_WAIT_S = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    parser.add_argument("--suite", required=True, help="suite to run")
    parser.add_argument("--shard", metavar="I/N", help="one shard of the suite (default: the whole suite)")
    parser.add_argument(
        "--file", action="append", default=[], metavar="PATH[::NODE]", help="only this test file or folder (repeatable)"
    )
    parser.add_argument("--plan", metavar="FILE", help="run this plan (default: MILES_CI_PLAN, else plan here)")
    parser.add_argument("--allow-empty", action="store_true", help="no test to run is no error")
    parser.add_argument("--results", metavar="DIR", help="where results go (default: MILES_CI_RESULTS_DIR or results)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="xdist workers of a CPU suite (default: 2)")
    parser.add_argument(
        "--wait-memory",
        type=float,
        default=120.0,
        metavar="S",
        help="how long to wait for a device to be empty before its test is an infra failure (default: 120)",
    )
    parser.add_argument(
        "--rerun-failed",
        type=int,
        metavar="K",
        help="repeat failed tests up to K times afterwards, to tell flaky from broken (default: 3 in nightly runs, else 0)",
    )
    parser.add_argument("--quiet", action="store_true", help="GPU suites: show the logs of failing tests only")
    add_selection(parser)


def main(args: argparse.Namespace) -> int:
    system.require()
    space = workspace(args)
    if args.suite not in space.fleet.suites:
        raise UsageError(
            f"--suite {args.suite}: not a suite of the registry{suggestion(args.suite, space.fleet.suites)}"
        )
    _check_numbers(args)
    plan, shard = _planned(args, space)
    units: tuple[Unit, ...] = ()
    if shard is not None:
        units = shard.units
        if args.file:
            units = only_files(units, _files(args, space, plan, shard), args.suite)
    if not units or shard is None:
        return _nothing(args, space, plan)
    return _run(args, space, plan, shard, units)


def _check_numbers(args: argparse.Namespace) -> None:
    if not 1 <= args.workers <= 256:
        raise UsageError(f"--workers {args.workers}: must be between 1 and 256")
    # Written so that nan, which compares with nothing, is refused too.
    if not 0 <= args.wait_memory <= MAX_WAIT_S:
        raise UsageError(f"--wait-memory {args.wait_memory:g}: must be between 0 and {MAX_WAIT_S} seconds")
    if args.rerun_failed is not None and not 0 <= args.rerun_failed <= MAX_RERUNS:
        raise UsageError(f"--rerun-failed {args.rerun_failed}: must be between 0 and {MAX_RERUNS}")


def _files(args: argparse.Namespace, space: Workspace, plan: Plan, shard: Shard) -> list[str]:
    """The words of --file from the root of the repository. `UsageError` for a file that another shard holds."""
    words = []
    for word in args.file:
        path, separator, node = word.partition("::")
        path = repository_path(space, path)
        holders = [
            other for other in plan.shards_of(args.suite)
            if any(unit.path == path or unit.path.startswith(f"{path}/") for unit in other.units)
        ]  # fmt: skip
        if holders and shard.index not in [other.index for other in holders]:
            places = ", ".join(f"{other.index}/{other.count}" for other in holders)
            raise UsageError(
                f"--file {path}: is in shard {places} of suite '{args.suite}', not in {shard.index}/{shard.count}; "
                "name that shard"
            )
        words.append(f"{path}{separator}{node}")
    return words


def _planned(args: argparse.Namespace, space: Workspace) -> tuple[Plan, Shard | None]:
    """The plan, verified or made here, and the shard of it to run; no shard when it has no test."""
    wanted = parse_shard(args.shard)
    given = args.plan or read("MILES_CI_PLAN")
    if given:
        if args.plan and _selects(args):
            raise UsageError("--plan: what runs was selected when the plan was made; leave out the selection options")
        plan = Plan.load(Path(given), digest=read("MILES_CI_PLAN_DIGEST"))
        shards = plan.shards_of(args.suite)
        if wanted is None and len(shards) > 1:
            raise UsageError(
                f"--plan divides suite '{args.suite}' into {len(shards)} shards: name one with --shard I/N"
            )
        if wanted is not None and shards and wanted[1] != shards[0].count:
            raise PlanMismatch(
                f"--shard {args.shard}: the plan divides suite '{args.suite}' into {shards[0].count} shard(s)"
            )
    else:
        plan = _plan_here(args, space, 1 if wanted is None else wanted[1])
        shards = plan.shards_of(args.suite)
        if wanted is not None and shards and wanted[1] != shards[0].count:
            raise UsageError(
                f"--shard {args.shard}: suite '{args.suite}' needs {shards[0].count} shards, one for each set of pools"
            )
    index = 1 if wanted is None else wanted[0]
    return plan, next((shard for shard in shards if shard.index == index), None)


def _selects(args: argparse.Namespace) -> bool:
    return bool(args.cadence or args.cron or args.label or args.labels or args.base or args.diff)


def _plan_here(args: argparse.Namespace, space: Workspace, count: int) -> Plan:
    if not _selects(args):
        args.all_labels = True
    selection, affected = selection_of(args, space)
    reason = affected.reason if affected is not None else None
    options = PlanOptions(shards={args.suite: count}, suites=(args.suite,), affected=reason)
    return build_plan(space.catalog, space.fleet, selection, space.durations, options)


def _nothing(args: argparse.Namespace, space: Workspace, plan: Plan) -> int:
    """Zero tests: an error unless other shards of the suite have some, or the suite or the caller says that it may
    be."""
    selected, shards = plan.suite(args.suite).selected, plan.shards_of(args.suite)
    if shards:
        print(
            f"suite {args.suite}, shard {args.shard}: no test is left for it: the suite's {selected} test file(s) are in "
            f"the first {len(shards)} of {shards[0].count} shards"
        )
        return ExitCode.OK
    allowed = space.fleet.suites[args.suite].allow_empty
    reason = plan.suite(args.suite).reason
    if args.allow_empty or allowed is not None:
        why = "--allow-empty" if allowed is None else allowed.reason
        print(f"suite {args.suite}: no test to run: {reason} (allowed: {why})")
        return ExitCode.OK
    print(f"suite {args.suite}: no test to run: {reason}; give --allow-empty if that is intended")
    return ExitCode.ZERO_TESTS


def _run(args: argparse.Namespace, space: Workspace, plan: Plan, shard: Shard, units: tuple[Unit, ...]) -> int:
    from miles_ci.report import junit
    from miles_ci.report.results import summary
    from miles_ci.run.console import Console
    from miles_ci.run.devices.locks import sole_writer
    from miles_ci.run.rerun import rerun_failed
    from miles_ci.run.runner import run_plan

    folder = Path(args.results or read("MILES_CI_RESULTS_DIR") or space.root / "results").resolve() / shard.id
    devices = _devices(space, shard)
    # With --format json the results alone go to stdout.
    stream = sys.stderr if args.format == "json" else sys.stdout
    console = Console(stream, actions=os.environ.get("GITHUB_ACTIONS") == "true", quiet=args.quiet)
    console.line(
        f"suite {shard.suite}, shard {shard.index}/{shard.count}: {len(units)} file(s), plan {plan.digest[:16]}"
    )
    job = _job(args, space, plan, shard, units, folder)
    history = read("MILES_CI_HISTORY_URL")

    def open_history() -> HistoryStore:
        from miles_ci.history.store import open_store

        return open_store(str(history))

    with sole_writer(folder):
        # Written at the end only; that of an earlier run must not speak for one that is killed.
        (folder / junit.JUNIT_NAME).unlink(missing_ok=True)
        record = run_plan(
            job,
            devices=devices,
            console=console,
            open_store=open_history if history else None,
            default_branch=default_branch(),
        )
        times = (
            args.rerun_failed if args.rerun_failed is not None else (NIGHTLY_RERUNS if plan.cadence == "nightly" else 0)
        )
        if times:
            record = rerun_failed(job, record, times, devices=devices, console=console)
        junit.write(record, folder / junit.JUNIT_NAME)
    if args.format == "json":
        print_json(record.as_json())
    console.line(summary([record]))
    console.line(f"results: {folder}")
    return record.exit_code()


def _job(
    args: argparse.Namespace, space: Workspace, plan: Plan, shard: Shard, units: tuple[Unit, ...], folder: Path
) -> ShardJob:
    from miles_ci.run.devices.added import AddedBackend, device_backend
    from miles_ci.run.devices.slots import DEFAULT_FOLDER
    from miles_ci.run.judge.retry import rows_from
    from miles_ci.run.shard import ShardJob

    backend = device_backend(space.fleet, shard.backend, space.root.resolve())
    return ShardJob(
        root=space.root.resolve(),
        folder=folder,
        info=run_info(plan, shard),
        units=units,
        retry_rows=rows_from(space.fleet.retry),
        env=dict(os.environ),
        lock_dir=Path(read("MILES_CI_LOCK_DIR") or DEFAULT_FOLDER),
        timeout_s=float(shard.timeout_s),
        workers=args.workers,
        wait_memory_s=args.wait_memory,
        backend=backend if isinstance(backend, AddedBackend) else None,
    )


def _devices(space: Workspace, shard: Shard) -> tuple[Device, ...]:
    """The devices this runner may use; refused when they are not what the suite's registry entry promises."""
    if shard.backend == "cpu":
        return ()
    from miles_ci.registry.identify import MEMORY_TOLERANCE, model_of
    from miles_ci.run.devices.added import device_backend
    from miles_ci.run.devices.inventory import DevicesUnavailable, host_devices, inherited

    backend = device_backend(space.fleet, shard.backend, space.root.resolve())
    devices = inherited(host_devices(backend), backend)
    wanted = space.fleet.suites[shard.suite].hardware
    for device in devices:
        model = model_of(space.fleet, shard.backend, device.name)
        where = f"device {device.index} ({device.name})"
        if model not in wanted:
            raise DevicesUnavailable(f"{where} is not what suite '{shard.suite}' needs: {' or '.join(wanted)}")
        promised = space.fleet.hardware[model].memory_gib * 1024
        if device.total_mib < promised * MEMORY_TOLERANCE:
            raise DevicesUnavailable(
                f"{where} has {device.total_mib} MiB, but hardware.{model} promises {promised} MiB"
            )
    return devices
