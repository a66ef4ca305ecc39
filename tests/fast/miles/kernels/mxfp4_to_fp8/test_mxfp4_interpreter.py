"""The conversion kernel under the interpreter gives the reference's bytes, scales and loss counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from miles_ci.declare import register_cpu_ci

register_cpu_ci(30, "stage-a-cpu", nightly=True)

ROOT = Path(__file__).resolve().parents[5]
CODE = """
import torch
from miles.kernels.mxfp4_to_fp8 import api, reference
g = torch.Generator().manual_seed(0)
packed, scales = [], []
for (m, n), (low, high) in (((128, 128), (118, 124)), ((1, 32), (0, 12)), ((130, 160), (100, 140)), ((200, 416), (90, 110))):
    p = torch.randint(0, 256, (m, n // 2), dtype=torch.uint8, generator=g)
    p[torch.rand(m, n // 2, generator=g) < 0.3] = 0
    p.view(m, n // 32, 16)[torch.rand(m, n // 32, generator=g) < 0.2] = 8
    packed.append(p)
    scales.append(torch.randint(low, high, (m, n // 32), dtype=torch.uint8, generator=g))
lossy = 0
for p, s, got in zip(packed, scales, api.mxfp4_to_fp8(packed, scales), strict=True):
    want = reference.convert(p, s)
    lossy += int(want.lossy.sum())
    for field in ("q", "scale", "max_k", "lossy"):
        assert torch.equal(getattr(want, field), getattr(got, field)), (tuple(p.shape), field)
assert lossy > 0
scales[2][129, 4] = 255
try:
    api.mxfp4_to_fp8(packed, scales)
except ValueError as error:
    assert "weights[2]: scale code 255 (NaN) in tile [1, 1]" in str(error), error
else:
    raise AssertionError("a NaN scale passed")
"""


def test_interpreter_equals_reference_for_edge_tiles_lists_and_lossy_tiles() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
