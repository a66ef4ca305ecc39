"""The NVFP4 kernel on a GPU gives the reference's bits: shapes, types, data, configurations, captures, devices."""

from __future__ import annotations

import zlib

import pytest
import torch

from ci.declare import register_cuda_ci
from miles.kernels.nvfp4_qdq import api, reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

register_cuda_ci(est_time=60, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["kernels"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = [(1, 16), (3, 48), (31, 128), (128, 64), (257, 1040), (1024, 2048), (8, 256, 512)]
CONFIGS = [NVFP4QDQConfig(), NVFP4QDQConfig(decode="stored")] + [
    NVFP4QDQConfig(use_4over6=True, e4m3_max=e, error_mode=mode, error_use_fast_math=fast)
    for e in (448, 256)
    for mode in ErrorMode
    for fast in (False, True)
]
KINDS = ("normal", "wide", "boundary", "zeros", "max", "tiny", "sparse")


def data(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr((kind, shape)).encode()))
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x = (x * torch.exp(4 * torch.randn(shape, generator=generator))).clamp(-6e4, 6e4)
    elif kind == "boundary":
        steps = torch.randint(-25, 26, shape, generator=generator) * 0.5 + (x.sign() * 1e-3)
        x = steps.clamp(-12, 12)
    elif kind == "zeros":
        x = torch.zeros(shape)
        x.view(-1)[1::2] = -0.0
    elif kind == "max":
        x = torch.where(x > 1, torch.finfo(dtype).max / 512, x)
    elif kind == "tiny":
        x = x * (1e-30 if dtype == torch.bfloat16 else 1e-6)
    elif kind == "sparse":
        x = torch.where(x > 2, x * 1000, 0.0)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "config",
    CONFIGS,
    ids=lambda c: (
        f"{'4o6' if c.use_4over6 else 'std'}-{c.e4m3_max}-{c.error_mode.value}-{'fp16' if c.error_use_fast_math else 'exact'}-{c.decode}"
    ),
)
def test_kernel_equals_reference_on_cpu_and_on_the_device(config: NVFP4QDQConfig, dtype: torch.dtype) -> None:
    weights = [data(kind, shape, dtype) for shape in SHAPES for kind in KINDS]
    on_device = [w.cuda() for w in weights]
    got = api.qdq_nvfp4(on_device, config)
    for w, d, y in zip(weights, on_device, got, strict=True):
        want = reference.qdq(w, config)
        assert torch.equal(y.cpu().view(torch.int16), want.view(torch.int16)), (tuple(w.shape), w.flatten()[:4])
        if w.numel() < 1e6:
            assert torch.equal(reference.qdq(d, config).cpu().view(torch.int16), want.view(torch.int16))
    api.raise_if_flagged()


def test_every_launch_shape_gives_the_same_bits() -> None:
    w = data("wide", (257, 1040), torch.bfloat16).cuda()
    want = reference.qdq(w, CONFIGS[2])
    for launch in (api.Launch(128, 1, 4), api.Launch(256, 3, 8, False, False), api.Launch(64, 8, 2, True, True)):
        assert torch.equal(api.qdq_nvfp4([w], CONFIGS[2], launch=launch)[0], want)


def test_integer_view_of_a_parameter_is_read_unchanged() -> None:
    base = torch.randint(-(2**15), 2**15, (64, 256), dtype=torch.int16).cuda()
    base[(base & 0x7F80) == 0x7F80] = 0
    w = base.view(torch.bfloat16)
    config = NVFP4QDQConfig(decode="stored")
    assert torch.equal(api.qdq_nvfp4([w], config)[0].view(torch.int16), reference.qdq(w, config).view(torch.int16))


def test_graph_capture_replays_on_new_values_after_a_warm_up() -> None:
    w = data("normal", (256, 512), torch.bfloat16).cuda()
    with pytest.raises(RuntimeError, match="warm up first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        api.qdq_nvfp4([w], NVFP4QDQConfig(), launch=api.Launch(128, 2, 4))
    api.qdq_nvfp4([w], NVFP4QDQConfig())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = api.qdq_nvfp4([w], NVFP4QDQConfig())[0]
    w.copy_(data("wide", (256, 512), torch.bfloat16))
    graph.replay()
    assert torch.equal(y, reference.qdq(w, NVFP4QDQConfig()))


def test_non_finite_weight_raises_at_the_step_end_and_not_before() -> None:
    w = data("normal", (64, 64), torch.bfloat16).cuda()
    w[3, 5] = float("nan")
    api.qdq_nvfp4([w], NVFP4QDQConfig())
    with pytest.raises(ValueError, match="NaN or infinity"):
        api.raise_if_flagged()
    api.raise_if_flagged()
