"""Jobs of the generated workflows. Values come from the environment that the workflow sets; see miles_ci.bot.jobs.

miles-ci bot plan --cadence regular --root . --suites "stage-a-cpu" --output plan.json
miles-ci bot required-check --suites "stage-a-cpu" --plan plan --results results --output merged
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    jobs = parser.add_subparsers(dest="job", required=True, metavar="JOB")
    plan = jobs.add_parser("plan", help="plan job: plan.json, outputs, summary")
    plan.add_argument("--cadence", required=True)
    plan.add_argument("--root", type=Path, required=True, help="checkout that is planned, read as data")
    plan.add_argument("--suites", required=True, help="suite ids, separated by spaces")
    plan.add_argument("--output", type=Path, required=True)
    check = jobs.add_parser("required-check", help="the only required check")
    check.add_argument("--suites", required=True, help="suite ids, separated by spaces")
    for name in ("plan", "results", "output"):
        check.add_argument(f"--{name}", type=Path, required=True, help="folder")
    deps = jobs.add_parser("resolve-deps", help="directives and image of this run")
    deps.add_argument("--image", required=True)
    deps.add_argument("--image-tag", default="")
    image = jobs.add_parser("resolve-image", help="tag -> digest")
    image.add_argument("--reference", required=True)
    resolve = jobs.add_parser("resolve", help="rerun: registrations of the file")
    resolve.add_argument("--root", type=Path, required=True, help="checkout of the tested commit, read as data")
    for name in ("announce", "approve", "authorise", "card", "gateway", "lint-report", "report", "starvation", "sweep"):
        jobs.add_parser(name, help="see miles_ci.bot.jobs")


def main(args: argparse.Namespace) -> int:
    from miles_ci.bot.jobs import JOBS

    return JOBS[args.job](args)
