"""Metric bounds: judge records by hand, show the history behind them, promote candidates.

miles-ci metric-bound list                                                    every series with its trusted values
miles-ci metric-bound show --test tests/e2e/test_x.py --metric loss           its values, newest first
miles-ci metric-bound check --test tests/e2e/test_x.py --records DIR --hardware h200 --suite S
miles-ci metric-bound promote --test tests/e2e/test_x.py --metric loss        a person trusts the candidates
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles_ci.commands.options import add_workspace, workspace
from miles_ci.commands.output import print_json, print_table
from miles_ci.environment import read
from miles_ci.errors import ExitCode, UsageError, suggestion

if TYPE_CHECKING:
    from miles_ci.history.records import MetricIdentity
    from miles_ci.history.store import HistoryStore

SHOWN = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    parser.add_argument("action", choices=("list", "show", "check", "promote"))
    parser.add_argument("--history", metavar="URL", help="history store (default: MILES_CI_HISTORY_URL)")
    parser.add_argument("--test", metavar="PATH", help="test file of the series")
    parser.add_argument("--metric", help="metric of the series")
    parser.add_argument("--suite", help="suite of the series")
    parser.add_argument("--hardware", help="hardware model of the series")
    parser.add_argument("--records", metavar="DIR", help="check: folder of the metric records (*.jsonl)")


def main(args: argparse.Namespace) -> int:
    address = args.history or read("MILES_CI_HISTORY_URL")
    if not address:
        raise UsageError("metric-bound: name the history store with --history or MILES_CI_HISTORY_URL")
    from miles_ci.history.store import open_store

    store = open_store(address, create=False)
    try:
        if args.action == "check":
            return _check(args, store)
        chosen = [entry for entry in store.series() if _matches(args, entry[0])]
        if args.action == "list":
            return _list(args, chosen)
        if not args.test or not args.metric:
            raise UsageError(f"metric-bound {args.action} needs --test and --metric")
        if not chosen:
            names = {f"{entry[0].test} {entry[0].metric}" for entry in store.series()}
            raise UsageError(f"no series of {args.test} {args.metric}{suggestion(f'{args.test} {args.metric}', names)}")
        identities = [entry[0] for entry in chosen]
        return _show(args, store, identities) if args.action == "show" else _promote(args, store, identities)
    finally:
        store.close()


def _matches(args: argparse.Namespace, identity: MetricIdentity) -> bool:
    wanted = {"test": args.test, "metric": args.metric, "suite": args.suite, "hardware": args.hardware}
    return all(value is None or getattr(identity, name) == value for name, value in wanted.items())


def _list(args: argparse.Namespace, chosen: list[tuple[MetricIdentity, int, int]]) -> int:
    if args.format == "json":
        rows = [{**vars(identity), "trusted": trusted, "candidates": rest} for identity, trusted, rest in chosen]
        print_json(rows)
        return ExitCode.OK
    headers = ("test", "suite", "hardware", "gpus", "metric", "steps", "trusted", "candidates")
    rows_text = [
        (i.test, i.suite, i.hardware, i.num_gpus, i.metric, i.steps, trusted, rest) for i, trusted, rest in chosen
    ]
    print_table(headers, rows_text, right=(3, 6, 7))
    print(f"{len(chosen)} series")
    return ExitCode.OK


def _show(args: argparse.Namespace, store: HistoryStore, identities: list[MetricIdentity]) -> int:
    from miles_ci.history.records import CANDIDATE, TRUSTED

    rows = [
        (identity.suite, identity.hardware, identity.spec_digest, position, value.state, value.value, value.run_id)
        for identity in identities
        for position in store.positions(identity)
        for state in (TRUSTED, CANDIDATE)
        for value in store.values(identity, state=state, limit=SHOWN, position=position)
    ]
    headers = ("suite", "hardware", "bound", "position", "state", "value", "run")
    if args.format == "json":
        print_json([dict(zip(headers, row, strict=True)) for row in rows])
    else:
        print_table(headers, rows, right=(3, 5))
    return ExitCode.OK


def _promote(args: argparse.Namespace, store: HistoryStore, identities: list[MetricIdentity]) -> int:
    if len(identities) > 1:
        kinds = "; ".join(f"{i.suite} {i.hardware} bound {i.spec_digest}" for i in identities)
        raise UsageError(
            f"metric-bound promote: {len(identities)} series match, narrow with --suite and --hardware: {kinds}"
        )
    changed = sum(store.promote(identities[0], position=position) for position in store.positions(identities[0]))
    print(f"{changed} candidate(s) of {args.test} {args.metric} are trusted now")
    return ExitCode.OK


def _check(args: argparse.Namespace, store: HistoryStore) -> int:
    """Judge records on disk against the history; writes nothing."""
    from miles_ci.history import corridor
    from miles_ci.history.records import MetricIdentity

    if not (args.test and args.records and args.suite and args.hardware):
        raise UsageError("metric-bound check needs --test, --records, --suite and --hardware")
    space = workspace(args)
    found = [item for item in space.catalog.registrations if item.path == args.test and item.suite == args.suite]
    if not found:
        raise UsageError(f"{args.test}: not registered in suite '{args.suite}'")
    bounds = [bound for bound in space.catalog.metric_bounds.get(args.test, ()) if args.metric in (None, bound.metric)]
    if not bounds:
        raise UsageError(f"{args.test}: declares no metric bound{f' on {args.metric}' if args.metric else ''}")
    records = corridor.read_records(Path(args.records))
    base = MetricIdentity(args.test, found[0].backend, args.suite, args.hardware, found[0].num_gpus, "", "", "")
    verdicts = []
    for bound in bounds:
        steps = corridor.steps_text(bound.steps)
        identity = replace(base, metric=bound.metric, steps=steps, spec_digest=bound.digest)
        trusted = corridor.trusted_values(store, identity, store.positions(identity))
        verdicts.append(corridor.evaluate(bound, records.get(bound.metric), trusted))
    if args.format == "json":
        print_json([vars(verdict) for verdict in verdicts])
    else:
        print_table(("metric", "verdict", "why"), [(v.metric, v.verdict, v.message) for v in verdicts])
    bad = any(verdict.verdict in (corridor.FAIL, corridor.ERROR) for verdict in verdicts)
    return ExitCode.METRIC_BOUND if bad else ExitCode.OK
