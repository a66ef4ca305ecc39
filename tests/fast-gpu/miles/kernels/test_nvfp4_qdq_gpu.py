"""The NVFP4 kernel on a GPU gives the reference's bits: shapes, types, data, configurations, captures, devices."""

from __future__ import annotations

import warnings
import zlib

import pytest
import torch
import triton
import triton.language as tl

from miles.kernels.nvfp4_qdq import api, reference
from miles.kernels.nvfp4_qdq.arithmetic import quick_inverse_scale
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=100, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["kernels"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = [(1, 16), (3, 48), (31, 128), (128, 64), (257, 1040), (1024, 2048), (8, 256, 512)]
CONFIGS = [NVFP4QDQConfig(), NVFP4QDQConfig(decode="stored")] + [
    NVFP4QDQConfig(use_4over6=True, e4m3_max=e, error_mode=mode, error_use_fast_math=fast)
    for e in (448, 256)
    for mode in ErrorMode
    for fast in (False, True)
]
KINDS = ("normal", "wide", "boundary", "zeros", "max", "tiny", "sparse", "coarse", "outlier")


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
    elif kind == "coarse":  # half of the blocks have two equal or nearly equal 4over6 errors
        x = torch.randint(-24, 25, shape, generator=generator) * 0.5
    elif kind == "outlier":  # every other block's scale is among the smallest
        x = x * 2e-3
        x.view(-1)[0] = 448.0
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


@pytest.mark.parametrize("maxima", ["given", "included"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=["standard", "4over6"])
def test_graph_replays_give_the_rounding_of_the_values_of_that_moment(config: NVFP4QDQConfig, maxima: str) -> None:
    first, second = (data(kind, (256, 512), torch.bfloat16).cuda() for kind in ("normal", "coarse"))
    w = first.clone()
    amax = api.amax_nvfp4([w])
    given = amax if maxima == "given" else None
    api.qdq_nvfp4([w], config, given)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an empty graph is a warning
        with torch.cuda.graph(graph):
            y = api.qdq_nvfp4([w], config, given)[0]
    y.fill_(float("nan"))
    for values in (first, second, first):
        w.copy_(values)
        amax.copy_(reference.tensor_amax(values))
        graph.replay()
        assert torch.equal(y.view(torch.int16), reference.qdq(values, config).view(torch.int16))
    assert not torch.equal(reference.qdq(first, config), reference.qdq(second, config))


def test_first_compile_inside_a_capture_is_refused() -> None:
    w = data("normal", (256, 512), torch.bfloat16).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = w * 2  # so that the graph is not empty
        with pytest.raises(RuntimeError, match="warm up first"):
            api.qdq_nvfp4([w], NVFP4QDQConfig(), launch=api.Launch(128, 2, 4))
    graph.replay()
    assert torch.equal(doubled, w * 2)


@pytest.mark.parametrize("config", CONFIGS[:4], ids=str)
def test_maxima_other_than_the_weights_own_round_as_in_the_reference(config: NVFP4QDQConfig) -> None:
    w = data("wide", (257, 1040), torch.bfloat16).cuda()
    for factor in (4.0, 0.25, 1e-3):
        amax = api.amax_nvfp4([w]) * factor
        got = api.qdq_nvfp4([w], config, amax)[0]
        assert torch.equal(got.view(torch.int16), reference.qdq(w, config, amax[0]).view(torch.int16)), factor


@triton.jit
def inverse_kernel(x, out, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(out + i, quick_inverse_scale(1.0, tl.load(x + i), True))


@pytest.mark.parametrize("exponent", [-60, -20, -1, 0, 30])
def test_short_reciprocal_is_correctly_rounded_for_every_mantissa(exponent: int) -> None:
    x = (torch.arange(1 << 23, dtype=torch.int32, device="cuda") + ((127 + exponent) << 23)).view(torch.float32)
    out = torch.empty_like(x)
    inverse_kernel[(x.numel() // 1024,)](x, out, N=1024, enable_fp_fusion=False)
    assert torch.equal(out, (1.0 / x.double()).float())


def test_non_finite_weight_raises_at_the_step_end_and_not_before() -> None:
    w = data("normal", (64, 64), torch.bfloat16).cuda()
    w[3, 5] = float("nan")
    api.qdq_nvfp4([w], NVFP4QDQConfig())
    with pytest.raises(ValueError, match="NaN or infinity"):
        api.raise_if_flagged()
    api.raise_if_flagged()
