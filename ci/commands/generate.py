"""Write the GitHub workflows from registry.yaml.

`--check` writes nothing: it prints the difference as a unified diff and exits 7 when there is one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ci.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="compare only; exit 7 on drift")
    parser.add_argument("--root", type=Path, default=Path("."), help="repository (default: here)")


def main(args: argparse.Namespace) -> int:
    from ci.fleet import Fleet
    from ci.workflows import generate

    fleet = Fleet.load(args.root / "registry.yaml", shown_as="registry.yaml")
    if args.check:
        difference = generate.drift(fleet, args.root)
        sys.stdout.write(difference)
        if difference:
            print("workflows differ from registry.yaml: run `miles-ci generate` and commit the result", file=sys.stderr)
            return ExitCode.DRIFT
        print(f"{len(generate.render(fleet))} workflow files are current")
        return ExitCode.OK
    changed = generate.write(fleet, args.root)
    for name in changed:
        print(name)
    print(f"{len(changed)} of {len(generate.render(fleet))} workflow files changed")
    return ExitCode.OK
