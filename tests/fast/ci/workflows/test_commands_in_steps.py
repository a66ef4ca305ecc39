"""Every command of ours in a generated script is one that the command line takes, with the options it gets."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping

import pytest

from miles_ci.cli import COMMANDS
from miles_ci.workflows.model import Workflow

# What the shell puts in place of these is checked where it is made.
ARRAY = {
    "_run-cpu-ci.yml": ("--shard 1/2", "--file tests/fast/test_x.py"),
    "_run-ci.yml": ("--shard 1/2",),
    "_run-ci-rocm.yml": ("--shard 1/2",),
}
VALUES = {"CADENCE": "regular", "IMAGE": "cuda"}


def commands(workflows: Mapping[str, Workflow]) -> Iterator[tuple[str, str]]:
    for name, workflow in workflows.items():
        for job in workflow.jobs.values():
            for step in job.steps:
                for line in str(step.get("run", "")).splitlines():
                    if "python -m miles_ci " in line:
                        text = line[line.index("python -m miles_ci ") :].split(" ||")[0].split(" >")[0]
                        for target in ARRAY.get(name, ("",)) if "${target[@]}" in text else ("",):
                            filled = re.sub(r'"\$\{target\[@\]\}"', target, text)
                            yield name, re.sub(r"\$\{?(\w+)\}?", lambda m: VALUES.get(m[1], "value"), filled)


def test_the_command_line_takes_every_command(workflows: Mapping[str, Workflow]) -> None:
    seen = set()
    for name, line in commands(workflows):
        words = shlex.split(line)[3:]
        module = importlib.import_module(COMMANDS[words[0]][0])
        parser = argparse.ArgumentParser(prog=f"{name}: {words[0]}", allow_abbrev=False)
        module.add_arguments(parser)
        parser.parse_args(words[1:])
        seen.add(" ".join(words[:2]))
    assert {
        "run --suite",
        "bot plan",
        "bot required-check",
        "bot gateway",
        "bot card",
        "bot sweep",
        "images dependencies",
        "images build",
        "lint --workflows",
        "generate --check",
    } <= seen


def test_a_job_that_no_workflow_uses_does_not_exist(workflows: Mapping[str, Workflow]) -> None:
    from miles_ci.bot.jobs import JOBS

    used = {shlex.split(line)[4] for _, line in commands(workflows) if " bot " in line}
    assert used == set(JOBS)


def test_scripts_are_free_of_shellcheck_level_mistakes(workflows: Mapping[str, Workflow]) -> None:
    """Variables are quoted or inside [[ ]] / (( )); an unset one stops the script (set -u)."""
    for name, workflow in workflows.items():
        for job in workflow.jobs.values():
            for step in job.steps:
                for line in str(step.get("run", "")).splitlines():
                    bare = re.sub(r'"[^"]*"|\[\[.*?\]\]|\(\(.*?\)\)|\'[^\']*\'', "", line)
                    assert "$" not in bare, (name, job.id, line)


@pytest.mark.parametrize("name", ["_run-cpu-ci.yml", "pr-test.yml", "lint-patch.yml"])
def test_scripts_parse(workflows: Mapping[str, Workflow], name: str) -> None:
    import subprocess

    for job in workflows[name].jobs.values():
        for step in job.steps:
            if "run" in step:
                done = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False)
                assert done.returncode == 0, done.stderr
