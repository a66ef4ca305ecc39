"""At night the changes of seed 0 in each package: at least the share that mutants.toml asks for is noticed.

The draw keeps its changes while other code comes and goes, so a red night is somebody's change or somebody's test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checks.mutants.__main__ import SETTINGS
from checks.mutants.settings import read_settings
from miles_ci.declare import register_cpu_ci

register_cpu_ci(1500, "stage-b-cpu", nightly=True, serial=True)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1700)
def test_enough_changes_of_the_code_are_noticed() -> None:
    packages = list(read_settings(SETTINGS).packages)
    command = [
        sys.executable,
        "-m",
        "checks.mutants",
        *packages,
        "--sample",
        "30",
        "--seed",
        "0",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
