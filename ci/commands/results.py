"""Results of shards: show them, or merge them and prove that nothing planned was left unobserved.

miles-ci results show results                                      every results.json below the folder
miles-ci results merge --plan plan.json results --out merged.json  exit 5 on a dark test
miles-ci results merge --plan plan.json results --skipped stage-b-cpu="stage-a-cpu failed"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ci.commands.output import print_json
from ci.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "merge"))
    parser.add_argument("places", nargs="+", metavar="PLACE", help="results.json files, or folders that hold them")
    parser.add_argument("--plan", metavar="FILE", help="merge: the plan that was run")
    parser.add_argument("--out", metavar="FILE", help="merge: write the merged results as JSON")
    parser.add_argument("--suite", action="append", default=[], help="merge: look at this suite only (repeatable)")
    parser.add_argument(
        "--skipped",
        action="append",
        default=[],
        metavar="SUITE=REASON",
        help="merge: a suite whose jobs did not start, and why (repeatable)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def main(args: argparse.Namespace) -> int:
    from ci.report import results

    places = [Path(place) for place in args.places]
    for place in places:
        if not place.exists():
            raise UsageError(f"{place}: no such file or folder")
    if args.action == "merge":
        return _merge(args, places)
    shards = results.load_all(places)
    if args.format == "json":
        print_json([shard.as_json() for shard in shards])
    else:
        print(results.summary(shards))
    return 0


def _merge(args: argparse.Namespace, places: list[Path]) -> int:
    from ci.plan.model import Plan
    from ci.report import merge, results
    from ci.run.results import RESULTS_NAME, read_results, write_json

    if not args.plan:
        raise UsageError("results merge needs --plan FILE: without the plan nothing can be called missing")
    plan = Plan.load(Path(args.plan))
    # No result at all is the worst dark case and must not end as a usage error.
    files = [file for place in places for file in (sorted(place.rglob(RESULTS_NAME)) if place.is_dir() else [place])]
    shards = [read_results(file) for file in files]
    merged = merge.merge(plan, shards, skipped=_skipped(args.skipped), suites=args.suite or None)
    if args.out:
        write_json(Path(args.out), merged.as_json())
    if args.format == "json":
        print_json(merged.as_json())
    else:
        if shards:
            print(results.summary(shards))
        print(merge.text(merged))
    return merged.exit_code()


def _skipped(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        suite, separator, reason = word.partition("=")
        if not separator or not reason.strip():
            raise UsageError(f"--skipped {word}: write SUITE=REASON")
        found[suite] = reason
    return found
