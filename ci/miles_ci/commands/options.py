"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

from miles_ci.errors import UsageError
from miles_ci.registry.dates import parse_day
from miles_ci.select.affected import Affected, affected_of_diff, affected_since
from miles_ci.select.policy import CADENCES, Policy, cadence_of_cron
from miles_ci.select.selection import Selection, select
from miles_ci.workspace import Workspace


def add_workspace(parser: argparse.ArgumentParser, *, formats: tuple[str, ...] = ("text", "json")) -> None:
    """`--root`, `--registry`, `--format`, `--today`."""
    parser.add_argument("--root", metavar="DIR", help="repository root (default: where registry.yaml is, upwards)")
    parser.add_argument("--registry", metavar="FILE", help="registry file (default: registry.yaml in the root)")
    parser.add_argument("--format", choices=formats, default="text", help="output format (default: text)")
    parser.add_argument("--today", metavar="DATE", help="judge dates as of this day (default: today)")


def repository_path(space: Workspace, word: str) -> str:
    """A file or folder of the command line relative to the repository, whether it was named from here or from the root."""
    if not Path(word).exists() and (space.root / word).exists():
        return Path(word).as_posix()
    try:
        return Path(word).resolve().relative_to(space.root.resolve()).as_posix()
    except ValueError:
        return word


def workspace(args: argparse.Namespace) -> Workspace:
    found = Workspace.find(args.root, args.registry)
    day: date | None = parse_day(args.today, "--today") if args.today else None
    return Workspace(found.root, found.registry, day)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """What kind of run it is and what changed."""
    group = parser.add_argument_group("selection")
    group.add_argument("--cadence", choices=CADENCES, help="kind of run (default: regular)")
    group.add_argument("--cron", help="the cron of a schedule event; decides the cadence")
    group.add_argument(
        "--label", action="append", default=[], metavar="NAME", help="label of the pull request (repeatable)"
    )
    group.add_argument("--labels", default="", metavar="A,B", help="the same, separated by commas")
    group.add_argument("--all-labels", action="store_true", help="admit every domain label (manual dispatch)")
    group.add_argument("--base", metavar="REV", help="select only what changes since the merge base with REV can reach")
    group.add_argument("--diff", metavar="FILE", help="the same from saved `git diff --name-status -z -M` output")
    group.add_argument("--merge-base", metavar="SHA", help="revision of the old contents for --diff")


def policy_of(args: argparse.Namespace, space: Workspace) -> Policy:
    labels = [*args.label, *(label.strip() for label in args.labels.split(",") if label.strip())]
    cadence = args.cadence or "regular"
    if args.cron:
        cadence = cadence_of_cron(space.fleet, args.cron)
        if args.cadence and args.cadence != cadence:
            raise UsageError(f"--cadence {args.cadence} contradicts --cron '{args.cron}', which is {cadence}")
    return Policy.resolve(space.fleet, cadence, labels, all_labels=args.all_labels, typed=True)


def affected_by(args: argparse.Namespace, space: Workspace, policy: Policy) -> Affected | None:
    """The affected set, or None when no change is given or the policy does not look at it."""
    if args.base and args.diff:
        raise UsageError("--base and --diff exclude each other")
    if not policy.use_affected or not (args.base or args.diff):
        return None
    tests = {item.path for item in space.catalog.registrations}
    rules = space.fleet.selection_rules()
    if args.base:
        return affected_since(space.root, args.base, rules, tests)
    try:
        output = Path(args.diff).read_bytes()
    except OSError as error:
        raise UsageError(f"--diff {args.diff}: {error.strerror}") from error
    return affected_of_diff(space.root, output, rules, tests, merge_base=args.merge_base)


def selection_of(args: argparse.Namespace, space: Workspace) -> tuple[Selection, Affected | None]:
    policy = policy_of(args, space)
    affected = affected_by(args, space, policy)
    return select(space.catalog, space.fleet, policy, affected=affected, today=space.today), affected
