"""Analyse results and write status cards from them.

miles-ci report results                                 every failing test, grouped by signature
miles-ci report results --plan plan.json --form pr      the pull-request card as Markdown
miles-ci report results --form lark                     the Lark request as JSON (unsigned)
miles-ci report results --form html --out card.html     both cards as a page, for a look before a change
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from miles_ci.errors import ExitCode, UsageError
from miles_ci.files import write_output

if TYPE_CHECKING:
    from miles_ci.report.cards import Card


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="folder with results.json files, or one merged.json")
    parser.add_argument("--plan", type=Path, help="plan.json: adds tests that were never executed and skipped suites")
    parser.add_argument("--form", choices=("text", "pr", "summary", "lark", "html"), default="text")
    parser.add_argument("--title", default="Local results")
    parser.add_argument("--url", default=_this_run(), help="link of the run (default: this workflow run)")
    parser.add_argument("--out", type=Path, help="write here instead of to the terminal")


def main(args: argparse.Namespace) -> int:
    from miles_ci.report.cards import lark, pr_comment, summary
    from miles_ci.report.cards.html import page

    card = _card(args)
    if args.form == "text":
        text = _text(card)
    elif args.form == "pr":
        text = pr_comment.render(card)
    elif args.form == "summary":
        text = summary.render(card)
    elif args.form == "lark":
        text = lark.request(card, 0, None).decode()
    else:
        text = page(card)
    if args.out:
        write_output(args.out, text.encode())
        print(f"{args.out}: {len(text.encode()):,} bytes")
    else:
        sys.stdout.write(text + ("" if text.endswith("\n") else "\n"))
    return ExitCode.OK if card.report.ok else ExitCode.TEST_FAILURE


def _card(args: argparse.Namespace) -> Card:
    from miles_ci.plan.model import Plan
    from miles_ci.report.analyse import analyse
    from miles_ci.report.cards import Card, JobRow
    from miles_ci.report.cards.model import default_analyses
    from miles_ci.report.merge import merge
    from miles_ci.report.results import find_results
    from miles_ci.report.strict_json import loads
    from miles_ci.report.untrusted import read_shard
    from miles_ci.run.results import read_results

    if args.results.is_file():
        top = loads(args.results.read_bytes(), what=str(args.results))
        shards = [read_shard(entry, str(args.results)) for entry in top["shards"]]
        never_executed, faults, skipped = (
            top.get("never_executed", []),
            top.get("faults", []),
            top.get("skipped_suites", {}),
        )
    else:
        files = find_results([args.results]) if args.results.exists() else []
        if not files:
            raise UsageError(f"{args.results}: no results.json below this folder")
        shards, never_executed, faults, skipped = (
            [read_shard(file.read_bytes(), str(file)) for file in files],
            [],
            [],
            {},
        )
        if args.plan:
            merged = merge(Plan.load(args.plan), [read_results(file) for file in files])
            never_executed, faults, skipped = list(merged.never_executed), list(merged.faults), dict(merged.skipped)
    report = analyse(shards, never_executed=never_executed, faults=faults, skipped=skipped)
    jobs = tuple(
        JobRow(
            f"{shard.suite} ({shard.shard})",
            args.url,
            "failure" if any(t.blocks for t in shard.tests) else "success",
            default_analyses(report, shard.suite, shard.shard),
        )
        for shard in shards
    )
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Card(args.title, "regular", when, args.url, "success" if report.ok else "failure", report, jobs)


def _this_run() -> str:
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    repository, run = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_RUN_ID")
    return f"{server}/{repository}/actions/runs/{run}" if repository and run else server


def _text(card: Card) -> str:
    from miles_ci.report.cards.model import totals

    lines = [totals(card.report)]
    for group in card.report.groups:
        lines.append(
            f"\n{len(group.tests)} x {group.category} [{group.signature}]: {group.message.splitlines()[0] if group.message else ''}"
        )
        lines += [f"  {test.suite} {test.shard}  {test.node}" for test in group.tests]
    lines += [f"never executed: {name}" for name in card.report.never_executed]
    lines += [f"fault: {fault}" for fault in card.report.faults]
    lines += [f"skipped {suite}: {reason}" for suite, reason in sorted(card.report.skipped.items())]
    return "\n".join(lines) + "\n"
