"""Write a first registry.yaml (one CPU suite, every cadence) and its JSON Schema into a repository that has none.

miles-ci init
miles-ci init --root ../other

Then: `miles-ci lint`, `miles-ci run --suite stage-a-cpu`. Machines with GPUs are added as docs/ci/adopt.md shows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from miles_ci.errors import ExitCode, UsageError
from miles_ci.registry.load import REGISTRY
from miles_ci.registry.schema import SCHEMA_PATH, schema_text

FIRST_REGISTRY = Path(__file__).resolve().parents[1] / "registry" / "first_registry.yaml"

NEXT = """\
now: put a first test into tests/fast/test_*.py, then miles-ci lint, then miles-ci run --suite stage-a-cpu
later: a GPU suite needs entries of hardware: and pools:, and for `miles-ci generate` one of images:, whose name begins \
with cuda or rocm"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path("."), metavar="DIR", help="repository (default: here)")


def main(args: argparse.Namespace) -> int:
    if not args.root.is_dir():
        raise UsageError(f"--root {args.root}: no such folder")
    schema = args.root / SCHEMA_PATH
    schema.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(args.root / REGISTRY, "x", encoding="utf-8") as file:
            file.write(FIRST_REGISTRY.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise UsageError(f"{args.root / REGISTRY} exists already; `miles-ci lint` checks it") from error
    schema.write_text(schema_text(), encoding="utf-8")
    print(f"{REGISTRY}\n{SCHEMA_PATH}\n{NEXT}")
    return ExitCode.OK
