"""The Triton kernels under the interpreter give the reference's bits. Run in a child: the mode is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(60, "stage-a-cpu", nightly=True)

ROOT = Path(__file__).resolve().parents[5]

BODY = """
import sys, warnings
import torch
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
from miles.kernels.nvfp4_qdq import api, reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

SHAPES = [(1, 16), (3, 48), (31, 128), (128, 64)]
CONFIGS = [NVFP4QDQConfig()] + [
    NVFP4QDQConfig(True, e, mode, fast) for e in (448, 256) for mode in ErrorMode for fast in (False, True)
]


def data(kind, shape, dtype):
    g = torch.Generator().manual_seed(len(kind) * 1000 + shape[0])
    x = torch.randn(shape, generator=g)
    if kind == "boundary":
        x = (torch.randint(-24, 25, shape, generator=g) * 0.5 + x.sign() * 1e-3).clamp(-12.001, 12.001)
    elif kind == "zeros":
        x = torch.tensor([0.0, -0.0]).repeat(x.numel() // 2).view(shape)
    elif kind == "coarse":  # ties and near ties of the two 4over6 errors
        x = torch.randint(-24, 25, shape, generator=g) * 0.5
    elif kind == "outlier":  # most block scales are among the smallest
        x = x * 2e-3
        x.view(-1)[0] = 448.0
    elif kind == "max":
        x = torch.where(x > 1.5, torch.finfo(dtype).max / 1024, x)
    return x.to(dtype)


def differing(ys, ws, config):
    bad = 0
    for y, w in zip(ys, ws, strict=True):
        bad += int((y.view(torch.int16) != reference.qdq(w, config).view(torch.int16)).sum())
    return bad
"""


def run(code: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", BODY + code], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreter_equals_reference(dtype: str) -> None:
    """Every configuration meets all 4 shapes and all 4 kinds of data, paired anew each time (the interpreter pays by the
    program, so not as a full product; the GPU test has that)."""
    out = run(f"""
dtype = torch.{dtype}
KINDS = ("random", "boundary", "zeros", "max")
total = 0
for i, config in enumerate(CONFIGS):
    ws = [data(KINDS[(i + j) % 4], shape, dtype) for j, shape in enumerate(SHAPES)]
    bad = differing(api.qdq_nvfp4(ws, config), ws, config)
    assert bad == 0, (config, bad)
    total += sum(w.numel() for w in ws)
print(total)
""")
    assert int(out) == 9 * (16 + 144 + 3968 + 8192)


def test_lists_shared_maxima_views_ties_and_extreme_maxima() -> None:
    run("""
a, b = data("random", (31, 128), torch.bfloat16), data("boundary", (128, 64), torch.bfloat16)
for config in (CONFIGS[0], CONFIGS[1], NVFP4QDQConfig(decode="stored")):
    assert differing(api.qdq_nvfp4([a, b], config), [a, b], config) == 0
amax = api.amax_nvfp4([a, b], shared=[0, 0])
assert amax.tolist() == [float(torch.cat((a.flatten(), b.flatten())).abs().max())]
got = api.qdq_nvfp4([a, b], CONFIGS[0], shared=[0, 0])
for y, w in zip(got, (a, b)):
    assert torch.equal(y, reference.qdq(w, CONFIGS[0], amax[0])) and torch.equal(y, api.qdq_nvfp4([w], CONFIGS[0], amax)[0])
view = torch.randint(-(2**15), 2**15, (16, 32), dtype=torch.int16)
view[(view & 0x7F80) == 0x7F80] = 0
w = view.view(torch.bfloat16)
stored = NVFP4QDQConfig(decode="stored")
assert differing(api.qdq_nvfp4([w], stored), [w], stored) == 0
for kind in ("coarse", "outlier"):
    w = data(kind, (16, 64), torch.bfloat16)
    for config in (CONFIGS[1], CONFIGS[3], CONFIGS[4]):
        for factor in (1.0, 0.25):  # a smaller maximum saturates
            amax = api.amax_nvfp4([w]) * factor
            got = api.qdq_nvfp4([w], config, amax)[0]
            assert torch.equal(got.view(torch.int16), reference.qdq(w, config, amax[0]).view(torch.int16)), (kind, config)
for scale in (1e-30, 1e30):
    w = (torch.randn(8, 32) * scale).to(torch.bfloat16)
    for config in (CONFIGS[1], CONFIGS[4]):
        assert differing(api.qdq_nvfp4([w], config), [w], config) == 0, (scale, config)
for launch in (api.Launch(16, 3, 4), api.Launch(16, 2, 4, wide=False, ahead=True), api.Launch(64, 1, 4, wide=False)):
    assert differing(api.qdq_nvfp4([a], CONFIGS[0], launch=launch), [a], CONFIGS[0]) == 0
api.raise_if_flagged()
""")


def test_wrong_inputs_are_refused_and_non_finite_ones_flagged() -> None:
    run("""
def refused(kind, text, weights, **more):
    try:
        api.qdq_nvfp4(weights, NVFP4QDQConfig(), **more)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


w = data("random", (16, 32), torch.bfloat16)
refused(ValueError, "empty list", [])
refused(TypeError, "is not bfloat16 or float16", [w.float()])
refused(TypeError, "differs from weights[0]", [w, w.half()])
refused(ValueError, "expected [M, K]", [w.flatten()])
refused(ValueError, "multiple of 16", [torch.zeros(4, 24, dtype=torch.bfloat16)])
refused(ValueError, "multiple of 16", [torch.zeros(0, 32, dtype=torch.bfloat16)])
refused(ValueError, "must be contiguous", [w.t()])
refused(ValueError, "16-byte aligned", [torch.zeros(33, dtype=torch.bfloat16)[1:].view(2, 16)])
refused(ValueError, "amax must be float32 of shape (1,)", [w], amax=torch.zeros(2))
refused(ValueError, "shared must give a slot", [w, w], shared=[0, 2])
for value, text in ((float("nan"), "NaN or infinity"), (float("inf"), "NaN or infinity"), (3e38, "use decode='stored'")):
    bad = w.clone()
    bad[3, 5] = value
    api.qdq_nvfp4([bad], NVFP4QDQConfig())
    try:
        api.raise_if_flagged()
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
    api.raise_if_flagged()
""")
