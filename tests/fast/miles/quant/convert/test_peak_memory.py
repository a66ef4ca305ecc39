"""What a conversion holds in memory: one tensor at a time, whatever the size of the checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]

# In a process of its own: a first, small conversion loads all code, then the peak is counted from what is resident.
MEASURE = """
import sys
from pathlib import Path
import torch
from miles.quant.convert.mxfp4_to_fp8 import convert


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


torch.set_num_threads(1)
convert(Path(sys.argv[1]), Path(sys.argv[3]) / "warm")
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
convert(Path(sys.argv[2]), Path(sys.argv[3]) / "out")
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' peak-memory reset")
def test_peak_memory_is_at_most_two_shards(mxfp4_checkpoint, tmp_path: Path) -> None:
    small = mxfp4_checkpoint(layers=1, name="small")
    source = mxfp4_checkpoint(layers=2, experts=2, m=1024, n=8192)
    shard = max(p.stat().st_size for p in source.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, source, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    print(f"{grown / 1e6:.1f} MB for shards of {shard / 1e6:.1f} MB")
    largest = 1024 * 8192 * 3 // 2  # one packed weight and its result: less could not be right
    assert largest / 2 < grown <= 2 * shard, f"{grown / 1e6:.0f} MB for shards of {shard / 1e6:.0f} MB"
