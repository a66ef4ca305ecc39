"""Every branch of the quantisation kernels, on shapes small enough for every run: the same bits as the references.

One child process with the Triton interpreter, which is chosen at import. The full lists of shapes and data run at
night (tests/fast/miles/kernels) and on the GPU (tests/fast-gpu/miles/kernels).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[4]

NVFP4 = """
import torch
from miles.kernels.nvfp4_qdq import api, reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

configs = [NVFP4QDQConfig(), NVFP4QDQConfig(decode="stored")] + [
    NVFP4QDQConfig(True, e, mode, fast) for e in (448, 256) for mode in ErrorMode for fast in (False, True)
]
g = torch.Generator().manual_seed(0)
ties = torch.tensor([0, .25, .5, .75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])
near = torch.stack([ties, -ties, ties + 1e-3, -(ties - 1e-3), ties * 0.6, -0.0 * ties])
random = torch.randn(3, 48, generator=g) * torch.tensor([1.0, 30.0, 1e-3])[:, None]
weights = {dtype: [near.to(dtype), random.to(dtype)] for dtype in (torch.bfloat16, torch.float16)}


def same(got, want):
    assert got.dtype == want.dtype and torch.equal(got.view(torch.int16), want.view(torch.int16))


for i, config in enumerate(configs):
    ws = weights[(torch.bfloat16, torch.float16)[i % 2]]
    for y, w in zip(api.qdq_nvfp4(ws, config), ws):
        same(y, reference.qdq(w, config))
pair = weights[torch.bfloat16]
shared = torch.cat([w.flatten() for w in pair]).abs().max().float()
for y, w in zip(api.qdq_nvfp4(pair, configs[2], shared=[0, 0]), pair):
    same(y, reference.qdq(w, configs[2], shared))
groups = torch.stack([near, near * 7]).to(torch.bfloat16)
same(api.qdq_nvfp4([groups], configs[3])[0], reference.qdq(groups, configs[3]))
for extreme in (1e-30, 1e30):
    w = (near * extreme).to(torch.bfloat16)
    same(api.qdq_nvfp4([w], configs[2])[0], reference.qdq(w, configs[2]))
api.raise_if_flagged()
w = near.to(torch.bfloat16)
w[2, 3] = float("nan")
api.qdq_nvfp4([w], configs[0])
try:
    api.raise_if_flagged()
except ValueError:
    print("nvfp4 equal")
"""

MXFP4 = """
import torch
from miles.kernels.mxfp4_to_fp8 import api, reference

g = torch.Generator().manual_seed(1)
packed = [torch.arange(256, dtype=torch.uint8).repeat(2).view(32, 16), torch.randint(0, 256, (130, 80), dtype=torch.uint8, generator=g)]
packed[1][:, 16:32] = 0x80
scales = [torch.tensor([[120]] + [[101]] * 31, dtype=torch.uint8), torch.randint(0, 30, (130, 5), dtype=torch.uint8, generator=g)]
lossy = 0
for got, p, s in zip(api.mxfp4_to_fp8(packed, scales), packed, scales):
    want = reference.convert(p, s)
    lossy += int(want.lossy.sum())
    for field in ("q", "scale", "max_k", "lossy"):
        assert torch.equal(getattr(want, field), getattr(got, field)), field
assert lossy > 0
print("mxfp4 equal")
"""


def test_kernels_give_the_references_bits_in_every_branch() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    quiet = "import warnings\nwarnings.filterwarnings('ignore')\n"
    done = subprocess.run(
        [sys.executable, "-c", quiet + NVFP4 + MXFP4], env=env, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:2] == ["nvfp4 equal", "mxfp4 equal"]
