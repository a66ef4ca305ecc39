"""At night some changes of each package, other ones every day: at least the share of mutants.toml is noticed."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
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
        "14",
        "--seed",
        f"{datetime.now(UTC):%Y-%m-%d}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
