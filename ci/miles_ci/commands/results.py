"""Results of shards: show them, or merge them and prove that nothing planned was left unobserved.

miles-ci results show results --slowest 20                         every results.json below the folder; exits as those runs
miles-ci results merge --plan plan.json results --out merged.json  exit 5 when a test was never executed
miles-ci results merge --plan plan.json results --skipped stage-b-cpu="stage-a-cpu failed"
miles-ci results flaky results --history URL --format json         drafted reports of flaky tests, and what to close
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from miles_ci.commands.output import print_json
from miles_ci.errors import UsageError, suggestion

# Which action an option belongs to; for any other one it would be ignored.
_OPTIONS = {
    "slowest": ("show",),
    "history": ("flaky",),
    "plan": ("merge",),
    "out": ("merge",),
    "suite": ("merge",),
    "skipped": ("merge",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "merge", "flaky"))
    parser.add_argument("places", nargs="+", metavar="PLACE", help="results.json files, or folders that hold them")
    parser.add_argument("--slowest", type=int, metavar="N", help="show: list the N slowest files (default 5)")
    parser.add_argument("--history", metavar="URL", help="flaky: history store (default: MILES_CI_HISTORY_URL)")
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
    from miles_ci.report import results
    from miles_ci.run.results import exit_code_of

    for name, actions in _OPTIONS.items():
        if getattr(args, name) not in (None, []) and args.action not in actions:
            raise UsageError(f"--{name} belongs to `results {actions[0]}`; `results {args.action}` does not know it")
    slowest = results.SLOWEST if args.slowest is None else args.slowest
    if not 0 <= slowest <= 10_000:
        raise UsageError(f"--slowest {slowest}: must be between 0 and 10000")
    places = [Path(place) for place in args.places]
    for place in places:
        if not place.exists():
            raise UsageError(f"{place}: no such file or folder")
    if args.action == "merge":
        return _merge(args, places)
    if args.action == "flaky":
        return _flaky(args, places)
    shards = results.load_all(places)
    if args.format == "json":
        print_json([shard.as_json() for shard in shards])
    else:
        print(results.summary(shards, slowest=slowest))
    return exit_code_of(shards)


def _merge(args: argparse.Namespace, places: list[Path]) -> int:
    from miles_ci.files import write_output
    from miles_ci.plan.model import Plan
    from miles_ci.report import merge, results
    from miles_ci.run.results import read_results

    if not args.plan:
        raise UsageError("results merge needs --plan FILE: without the plan nothing can be called missing")
    plan = Plan.load(Path(args.plan))
    known = [item.suite for item in plan.suites]
    for name in args.suite:
        if name not in known:
            raise UsageError(f"--suite {name}: not a suite of the plan{suggestion(name, known)}")
    # No result at all is the worst case and must not end as a usage error.
    shards = [read_results(file) for file in results.find_results(places)]
    merged = merge.merge(plan, shards, skipped=_skipped(args.skipped), suites=args.suite or None)
    if args.out:
        write_output(Path(args.out), (json.dumps(merged.as_json(), indent=1, sort_keys=True) + "\n").encode())
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


def _flaky(args: argparse.Namespace, places: list[Path]) -> int:
    """Reports to open and tests whose report may be closed; drafts only, nothing is sent."""
    from miles_ci.environment import read
    from miles_ci.history.flaky import CLOSE_AFTER, FLAKY, RECOVERED, assess, issue_body, issue_title
    from miles_ci.history.store import open_store
    from miles_ci.report.results import load_all

    address = args.history or read("MILES_CI_HISTORY_URL")
    store = open_store(address, create=False) if address else None
    drafts, closing = [], []
    try:
        for shard in load_all(places):
            for test in shard.tests:
                past = store.outcomes(test=test.unit, suite=shard.info.suite, limit=CLOSE_AFTER) if store else []
                found = assess(
                    test=test.unit, suite=shard.info.suite, outcome=test.outcome, reruns=test.reruns, history=past
                )
                if found.state == RECOVERED:
                    closing.append({"test": found.test, "suite": found.suite, "title": issue_title(found)})
                elif found.state == FLAKY:
                    first = next((failure for attempt in test.attempts for failure in attempt.failures), None)
                    body = issue_body(
                        found,
                        message=first.message if first else test.message,
                        signature=first.signature if first else "",
                        owner=shard.info.suite,
                    )
                    drafts.append({"test": found.test, "suite": found.suite, "title": issue_title(found), "body": body})
    finally:
        if store is not None:
            store.close()
    if args.format == "json":
        print_json({"open": drafts, "close": closing})
    else:
        for draft in drafts:
            print(f"# {draft['title']}\n\n{draft['body']}\n")
        for entry in closing:
            print(f"may be closed: {entry['title']}")
        print(f"{len(drafts)} flaky, {len(closing)} recovered")
    return 0
