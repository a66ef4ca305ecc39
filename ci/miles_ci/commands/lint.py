"""Check registry.yaml, its schema, the durations table and every declaration: all errors in one report.

Exit code 0 without errors (warnings do not count), 2 with any.
"""

from __future__ import annotations

import argparse
import sys

from miles_ci.commands.options import add_workspace, workspace
from miles_ci.commands.output import print_json
from miles_ci.errors import ExitCode, combine_exit_codes
from miles_ci.lint import LintReport, lint
from miles_ci.registry.schema import SCHEMA_PATH, schema_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser, formats=("text", "json", "github"))
    parser.add_argument(
        "--base", metavar="REV", help="also refuse exemptions that had passed when they were introduced"
    )
    parser.add_argument("--workflows", action="store_true", help="also lint the generated workflow files")
    parser.add_argument(
        "--require-tools", action="store_true", help="with --workflows: a tool that is absent is an error"
    )
    parser.add_argument("--write-schema", action="store_true", help=f"write {SCHEMA_PATH} from the model first")


def main(args: argparse.Namespace) -> int:
    space = workspace(args)
    if args.write_schema:
        target = space.root / SCHEMA_PATH
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(schema_text(), encoding="utf-8")
    report = lint(space, base=args.base)
    _print(report, args.format)
    codes = [ExitCode.CONFIG if report.errors else ExitCode.OK]
    if args.workflows:
        from miles_ci.workflows.check import check

        # Its report goes to stderr under --format json, so that stdout stays one document.
        say = print if args.format == "text" else _to_stderr
        codes.append(ExitCode(check(space.root, space.fleet, require_tools=args.require_tools, say=say)))
    return combine_exit_codes(codes)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _print(report: LintReport, form: str) -> None:
    if form == "json":
        print_json(
            {
                "errors": len(report.errors),
                "warnings": len(report.findings) - len(report.errors),
                "files": report.files,
                "declarations": report.declarations,
                "not_run": list(report.not_run),
                "findings": [item.as_json() for item in report.findings],
            }
        )
        return
    for item in report.findings:
        print(item.github() if form == "github" else item.text())
    warnings = len(report.findings) - len(report.errors)
    summary = f"{len(report.errors)} error(s), {warnings} warning(s) in {report.files} test files, {report.declarations} registrations"
    print(summary if form == "text" else f"::notice::{summary}")
    for reason in report.not_run:
        print(f"not run: {reason}", file=sys.stderr)
