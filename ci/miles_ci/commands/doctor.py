"""What this machine has, which suites can run here, and why the others cannot.

With --fleet: compare pool labels and counts with GitHub's runner list. Without a file it is asked for with
GITHUB_REPOSITORY and GITHUB_TOKEN (it must be allowed to read runners); a file is what
`gh api --paginate repos/OWNER/REPO/actions/runners` prints. A label that no runner carries is an error (exit code 2).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_ci.commands.options import add_workspace, workspace
from miles_ci.commands.output import print_json, print_table
from miles_ci.doctor import Machine, compare_runners, examine
from miles_ci.errors import ExitCode, UsageError
from miles_ci.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workspace(parser)
    parser.add_argument("--no-health", action="store_true", help="do not exercise the devices")
    parser.add_argument(
        "--fleet", nargs="?", const="", metavar="FILE", help="compare the registry with GitHub's runner list (in FILE)"
    )


def main(args: argparse.Namespace) -> int:
    space = workspace(args)
    if args.fleet is not None:
        return _fleet(space, args)
    machine = examine(space.fleet, space.root, check_health=not args.no_health)
    if args.format == "json":
        print_json(asdict(machine))
    else:
        _print(machine)
    return ExitCode.OK


def _print(machine: Machine) -> None:
    print(f"python {machine.python}, {machine.system}, {machine.cpus} CPUs")
    for backend, driver in machine.drivers.items():
        print(f"{backend} driver: {driver}")
    if machine.devices:
        rows = [
            (d.index, d.backend, d.name, d.model or "not in the registry", d.total_mib, d.bus_id)
            for d in machine.devices
        ]
        print_table(("#", "backend", "device", "model", "MiB", "bus id"), rows, right=(0, 4))
        for backend, state in machine.health.items():
            print(f"{backend} health: {state}")
        print(f"capabilities: {', '.join(machine.capabilities) or 'none'}")
    print_table(
        ("suite", "here", "why not"),
        [(item.suite, "runs" if item.runs else "cannot run", item.reason) for item in machine.suites],
    )


def _fleet(space: Workspace, args: argparse.Namespace) -> int:
    findings = compare_runners(space.fleet, space.reading, _runners(Path(args.fleet)) if args.fleet else _ask_github())
    errors = [item for item in findings if item.severity == "error"]
    if args.format == "json":
        print_json({"errors": len(errors), "findings": [item.as_json() for item in findings]})
    else:
        for item in findings:
            print(item.text())
        print(
            f"{len(space.fleet.pools)} pools compared: {len(errors)} error(s), {len(findings) - len(errors)} warning(s)"
        )
    return ExitCode.CONFIG if errors else ExitCode.OK


def _ask_github() -> list[dict[str, Any]]:
    """Raises `CiError` when the environment or GitHub says no."""
    from miles_ci.bot.github import Client

    return list(Client.from_environment().pages("{repo}/actions/runners", "runners"))


def _runners(path: Path) -> list[dict[str, Any]]:
    """Runners of one page, of several pages that `gh --paginate` prints one after another, or a plain list."""
    try:
        text = path.read_text(encoding="utf-8")
        decoder = json.JSONDecoder()
        found: list[dict[str, Any]] = []
        position = 0
        while position < len(text.rstrip()):
            page, position = decoder.raw_decode(text, position)
            found.extend(page["runners"] if isinstance(page, dict) else page)
            while position < len(text) and text[position].isspace():
                position += 1
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: no runner list of GitHub: {error}") from error
