"""Write the GitHub workflows from registry.yaml.

`--check` writes nothing: it prints the difference as a unified diff and exits 7 when there is one.
"""

from __future__ import annotations

import argparse
import sys

from miles_ci.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="compare only; exit 7 on drift")
    parser.add_argument("--root", metavar="DIR", help="repository root (default: where registry.yaml is, upwards)")


def main(args: argparse.Namespace) -> int:
    from miles_ci.workflows import generate
    from miles_ci.workspace import Workspace

    space = Workspace.find(args.root)
    fleet = space.fleet
    if args.check:
        difference = generate.drift(fleet, space.root)
        sys.stdout.write(difference)
        if difference:
            print("workflows differ from registry.yaml: run `miles-ci generate` and commit the result", file=sys.stderr)
            return ExitCode.DRIFT
        print(f"{len(generate.render(fleet))} workflow files are current")
        return ExitCode.OK
    changed = generate.write(fleet, space.root)
    for name in changed:
        print(name)
    print(f"{len(changed)} of {len(generate.render(fleet))} workflow files changed")
    return ExitCode.OK
