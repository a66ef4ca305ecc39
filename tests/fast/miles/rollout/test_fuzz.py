"""A short run of the request fuzzer (`benchmarks/fuzz_engine.py` sends 100,000)."""

import subprocess
import sys
from pathlib import Path

from miles_ci.declare import register_cpu_ci

register_cpu_ci(30, "stage-a-cpu", nightly=True)

FUZZER = Path(__file__).parents[4] / "benchmarks" / "fuzz_engine.py"


def test_malformed_requests_change_nothing_and_disturb_no_other():
    command = [sys.executable, str(FUZZER), "--requests", "4000", "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("4000 malformed requests (seed 1")
    assert ": 0 faults;" in run.stdout
