"""Why each registration runs or does not: reason codes with the deciding line of the registry or the test.

miles-ci explain                                     every registration, counted by reason
miles-ci explain tests/e2e/test_x.py --label run-ci-core
"""

from __future__ import annotations

import argparse
from typing import Any

from miles_ci.commands.options import add_selection, add_workspace, repository_path, selection_of, workspace
from miles_ci.commands.output import print_json, print_table
from miles_ci.errors import ExitCode, UsageError, suggestion
from miles_ci.select.affected import Affected
from miles_ci.select.registrations import Fault
from miles_ci.select.selection import Excluded, Included, Reason, Selection
from miles_ci.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    add_selection(parser)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="test files or folders (default: all)")


def main(args: argparse.Namespace) -> int:
    space = workspace(args)
    selection, affected = selection_of(args, space)
    records = explain(space, selection, affected)
    wanted = [repository_path(space, path) for path in args.paths]
    if wanted:
        known = {record["path"] for record in records}
        for path in wanted:
            if not any(_inside(name, path) for name in known):
                raise UsageError(
                    f"{path}: no registered test file{suggestion(path, known) if len(known) < 5000 else ''}"
                )
        records = [record for record in records if any(_inside(record["path"], path) for path in wanted)]
    if args.format == "json":
        print_json({"cadence": selection.policy.cadence, "labels": list(selection.policy.labels), "tests": records})
        return ExitCode.OK
    _print(records, detailed=bool(wanted))
    for warning in selection.warnings:
        print(f"warning: {warning}")
    return ExitCode.OK


def _inside(path: str, wanted: str) -> bool:
    return path == wanted or path.startswith(wanted.rstrip("/") + "/")


def explain(space: Workspace, selection: Selection, affected: Affected | None) -> list[dict[str, Any]]:
    """One record for every registration and faulty file, each exactly once, sorted by path and suite."""
    records = [_included(space, item, selection, affected) for item in selection.included]
    records += [_excluded(space, item) for item in selection.excluded]
    records.sort(key=lambda record: (record["path"], record["suite"] or ""))
    return records


def _included(space: Workspace, item: Included, selection: Selection, affected: Affected | None) -> dict[str, Any]:
    registration, declaration = item.registration, item.registration.declaration
    hits = sorted(set(registration.labels) & selection.policy.include)
    why = []
    if hits:
        names = ", ".join(f"run-ci-{name}" if name in selection.policy.requested else name for name in hits)
        why.append(f"label {names} ({selection.policy.scope})")
    if affected is not None and registration.path in affected.via:
        why.append(f"reached from {affected.via[registration.path]}")
    if not registration.home:
        why.append("sent here by arches: all")
    if item.unstable:
        why.append(f"unstable, its failure does not block: {item.unstable}")
    return {
        "path": registration.path,
        "suite": registration.suite,
        "outcome": "included",
        "codes": [],
        "reasons": [
            {
                "code": "included",
                "text": "; ".join(why) or "admitted",
                "place": f"{declaration.path}:{declaration.line}",
            }
        ],
    }


def _excluded(space: Workspace, item: Excluded) -> dict[str, Any]:
    suite = None if isinstance(item.item, Fault) else item.item.suite
    return {
        "path": item.item.path,
        "suite": suite,
        "outcome": "excluded",
        "codes": [reason.code for reason in item.reasons],
        "reasons": [
            {"code": reason.code, "text": reason.text, "place": _place(space, item, reason)} for reason in item.reasons
        ],
    }


def _place(space: Workspace, item: Excluded, reason: Reason) -> str:
    """The deciding line: of the registry when a switch there decided, else of the test."""
    if reason.keys:
        line, _ = space.reading.document.place(reason.keys, of_key=True)
        return f"{space.shown_registry}:{line}"
    if isinstance(item.item, Fault):
        first = item.item.errors[0]
        return f"{first.path}:{first.line}"
    declaration = item.item.declaration
    line, _ = declaration.place(reason.field or "suite")
    return f"{declaration.path}:{line}"


def _print(records: list[dict[str, Any]], *, detailed: bool) -> None:
    if detailed:
        for record in records:
            print(f"{record['path']} in {record['suite'] or 'no suite'}: {record['outcome']}")
            for reason in record["reasons"]:
                print(f"  {reason['code']}: {reason['text']}  [{reason['place']}]")
        return
    rows = [
        (record["path"], record["suite"] or "-", ",".join(record["codes"]) or "included", record["reasons"][0]["place"])
        for record in records
    ]
    print_table(("test", "suite", "outcome", "deciding line"), rows)
    counts: dict[str, int] = {}
    for record in records:
        code = record["codes"][0] if record["codes"] else "included"
        counts[code] = counts.get(code, 0) + 1
    told = ", ".join(f"{count} {code}" for code, count in sorted(counts.items()))
    print(f"{len(records)} registration(s): {told or 'none'}")
