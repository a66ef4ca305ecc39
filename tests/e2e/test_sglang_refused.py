"""A run with SGLang engines that cannot start says so in one line, before Ray starts, in every command alike."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=30, suite="stage-b-cpu")

RECIPE = "recipes/quickstart_sglang.yaml"
COMMANDS = (("recipe", "check", RECIPE), ("train", RECIPE, "--dry-run"), ("train", RECIPE))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("python", "said"),
    [("/nowhere/python", "/nowhere/python: No such file"), (sys.executable, "sglang is not installed in")],
)
def test_a_wrong_interpreter_is_one_line(tmp_path, command, python, said):
    sets = ("--set", f"engine.python={python}", "--set", f"run.directory={tmp_path / 'runs'}")
    done = subprocess.run(
        [sys.executable, "-m", "miles.cli", *command, *sets], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()
