"""Codecs against the golden files, at the edges of fp32, and on bad input."""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from miles.kernels.formats import FLT_MAX, e4m3_decode, e8m0_decode
from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8, nvfp4
from miles.quant.codecs.checks import check_rounded

CASES = 6
GOLDEN = Path(__file__).resolve().parent / "golden"
CONFIGS = {"standard": NVFP4QDQConfig()} | {
    f"4over6-{e}-{mode.value}-{'fp16' if fast else 'exact'}": NVFP4QDQConfig(True, e, mode, fast)
    for e in (448, 256)
    for mode in ErrorMode
    for fast in (False, True)
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_golden_nvfp4(name: str, golden) -> None:
    file, config = golden("nvfp4"), CONFIGS[name]
    for case in range(CASES):
        x = file[f"{case}/x"].float()
        packed = nvfp4.quantize(x, config)
        want = {key: file[f"{case}/{name}/{key}"] for key in ("codes", "scale", "s_dec", "y")}
        blocks = reference.quantize_blocks(x, reference.tensor_amax(x), config)
        assert torch.equal(blocks.codes.flatten(1), want["codes"])
        assert torch.equal(packed.weight_scale.flatten(), want["scale"].flatten())
        assert torch.equal(bits(packed.weight_scale_2), bits(want["s_dec"]))
        assert torch.equal(bits(nvfp4.qdq(x, config)), bits(want["y"]))
        assert torch.equal(bits(nvfp4.dequantize(packed, config, torch.float32)), bits(want["y"]))
        half = x.to(torch.bfloat16)
        assert torch.equal(bits(nvfp4.qdq(half, config)), bits(want["y"].to(torch.bfloat16)))


@pytest.mark.parametrize(("name", "codec"), [("mxfp8", mxfp8), ("mxfp4", mxfp4)])
def test_golden_mx(name: str, codec, golden) -> None:
    file = golden(name)
    codes, scale = codec.quantize(file["x"])
    want = file["codes"] if name == "mxfp8" else file["codes"][:, 0::2] | file["codes"][:, 1::2] << 4
    assert torch.equal(codes, want)
    assert torch.equal(scale, file["scale"])
    assert torch.equal(bits(codec.dequantize(codes, scale, torch.float32)), bits(file["y"]))


@pytest.mark.parametrize("kind", ["fp32", "e8m0"])
def test_golden_fp8_block(kind: str, golden) -> None:
    file = golden("fp8")
    codes, scale = fp8_block.quantize(file["x"], scale=kind)
    assert torch.equal(codes, file[f"block-{kind}/codes"])
    assert torch.equal(e8m0_decode(scale) if kind == "e8m0" else scale, file[f"block-{kind}/scale"])
    back = fp8_block.dequantize(codes, scale, torch.float32)
    assert float((back - file["x"].float()).abs().max() / file["x"].float().abs().max()) < 0.04


def test_golden_fp8_tensor(golden) -> None:
    file = golden("fp8")
    codes, scale = fp8_tensor.quantize(file["x"])
    assert torch.equal(codes, file["tensor/codes"])
    assert torch.equal(scale, file["tensor/scale"])
    assert torch.equal(fp8_tensor.dequantize(codes, scale, torch.float32), e4m3_decode(codes) * scale)


def test_golden_files_name_their_generator_seed_and_origin() -> None:
    for name in ("nvfp4", "mxfp4", "mxfp8", "fp8"):
        with safe_open(GOLDEN / f"{name}.safetensors", "np") as f:
            metadata = f.metadata()
        assert metadata["generator"].endswith("generate.py")
        assert json.loads(metadata["versions"])["ml_dtypes"]
        assert metadata["origin"] == "numpy float32 with ml_dtypes casts"


PINNED = {
    "nvfp4": "260a5e743517a168",
    "mxfp4": "a5655cc948f16b54",
    "mxfp8": "2fe95f7ae103c1f5",
    "fp8": "a43c725cdecdebca",
}


@pytest.mark.parametrize("name", list(PINNED))
def test_golden_numbers_change_only_with_a_decision_record(name: str, golden) -> None:
    digest = hashlib.sha256()
    for key, tensor in sorted(golden(name).items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    assert digest.hexdigest()[:16] == PINNED[name], "write docs/decisions/04NN, then pin the new digest here"


def ramp_block() -> torch.Tensor:
    x = torch.zeros(2, 16)
    x[0] = (torch.arange(16) - 8) / 4
    x[1, 0] = 12.0
    return x


def test_the_specified_block_standard() -> None:
    x = ramp_block()
    blocks = reference.quantize_blocks(x, reference.tensor_amax(x), NVFP4QDQConfig())
    assert float(reference.tensor_scales(reference.tensor_amax(x), NVFP4QDQConfig())[0]) == 224.0
    assert float(blocks.s_dec) == float(torch.tensor(1.0) / 224.0)
    assert float(e4m3_decode(blocks.scale8)[0, 0]) == 72.0
    assert (blocks.codes[0, 0] & 7).tolist() == [7, 7, 6, 6, 5, 4, 3, 2, 0, 2, 3, 4, 5, 6, 6, 7]
    y = nvfp4.qdq(x.to(torch.bfloat16), NVFP4QDQConfig())[0].float()
    assert [float(y[i]) for i in (0, 4, 7)] == [-1.9296875, -0.96484375, -0.322265625]


@pytest.mark.parametrize(
    ("config", "errors", "scale"),
    [
        (NVFP4QDQConfig(True), (1.39285707, 1.0), 112.0),
        (NVFP4QDQConfig(True, error_mode=ErrorMode.MSE), (0.199617386, 0.25), 72.0),
        (NVFP4QDQConfig(True, error_mode=ErrorMode.MSE, error_use_fast_math=True), (10016.0, 12544.0), 72.0),
        (NVFP4QDQConfig(True, e4m3_max=256), (1.5625, 1.0), 64.0),
    ],
)
def test_the_specified_block_4over6(config: NVFP4QDQConfig, errors: tuple[float, float], scale: float) -> None:
    x, amax = ramp_block(), torch.tensor(12.0)
    blocks = reference.quantize_blocks(x, amax, config)
    assert float(e4m3_decode(blocks.scale8)[0, 0]) == scale
    s_enc, s_dec = reference.tensor_scales(amax, config)
    first = x[:1].view(1, 1, 16)
    s6 = first.abs().amax(-1) / 6 * s_enc
    for factor, want in zip((1.0, 1.5), errors, strict=True):
        scale8 = reference.e4m3_encode((s6 * factor).clamp_max(448.0))
        codes = reference._encode(first, scale8, s_dec)
        assert float(reference.candidate_error(first, codes, scale8, amax, s_enc, config)) == pytest.approx(
            want, rel=1e-7
        )


def test_strict_less_tie_goes_to_6() -> None:
    x = torch.zeros(1, 16)
    x[0, 0] = 6.0  # both candidates hold 6 and 0 exactly: the errors are equal
    for config in (c for c in CONFIGS.values() if c.use_4over6 and c.e4m3_max == 448):
        blocks = reference.quantize_blocks(x, torch.tensor(6.0), config)
        assert int(blocks.codes[0, 0, 0]) == 7, config


def test_signed_zeros_survive_every_codec() -> None:
    x = torch.tensor([0.0, -0.0] * 64).view(2, 64)
    for y in (
        *(codec.dequantize(*codec.quantize(x), torch.float32) for codec in (mxfp8, mxfp4, fp8_tensor, fp8_block)),
        *(nvfp4.qdq(x, c) for c in CONFIGS.values()),
    ):
        assert torch.equal(bits(y), bits(x))


def test_a_block_too_small_for_its_scale_becomes_signed_zeros() -> None:
    x = torch.zeros(2, 16)
    x[0, 0], x[1] = 448.0, torch.tensor([1e-6, -1e-6] * 8)
    y = nvfp4.qdq(x, NVFP4QDQConfig())
    assert torch.equal(bits(y[1]), bits(torch.tensor([0.0, -0.0] * 8)))


@pytest.mark.parametrize("amax", [1e-45, 2.0**-126, 1e-37, 1e-20])
def test_tiny_maxima_stay_finite_and_keep_the_order_of_the_definition(amax: float, numpy_nvfp4) -> None:
    x = torch.tensor([amax, -amax, amax / 2, 0.0] * 4).view(1, 16)
    y = nvfp4.qdq(x, NVFP4QDQConfig())
    assert bool(torch.isfinite(y).all())
    want = numpy_nvfp4.NVFP4()(x.numpy(), amax)
    assert torch.equal(bits(y), bits(torch.from_numpy(want["y"])))


def test_largest_float_needs_the_stored_decode() -> None:
    x = torch.full((1, 16), FLT_MAX)
    with pytest.raises(ValueError, match="FLT_MAX/448: decode 'te' overflows, use decode='stored'"):
        nvfp4.qdq(x, NVFP4QDQConfig())
    assert bool(torch.isfinite(nvfp4.qdq(x / 2, NVFP4QDQConfig(decode="stored"))).all())
    wide = torch.full((1, 32), FLT_MAX)
    assert bool(mxfp8.dequantize(*mxfp8.quantize(wide / 2), torch.float32).isfinite().all())
    assert mxfp4.quantize(wide)[1].tolist() == [[253]]


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 3.39e38)])
def test_a_finite_weight_that_rounds_to_infinity_is_refused(dtype: torch.dtype, largest: float) -> None:
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 3] = largest
    e8m0 = partial(fp8_block.quantize, scale="e8m0")
    for codec, quantize in ((mxfp8, mxfp8.quantize), (mxfp4, mxfp4.quantize), (fp8_block, e8m0)):
        with pytest.raises(ValueError, match=rf"w: the weight at index \[1, 3\] rounds to inf in {dtype}; .*wider"):
            check_rounded(codec.dequantize(*quantize(x, name="w"), dtype), "w")
    for codec in (fp8_tensor, fp8_block):
        assert bool(codec.dequantize(*codec.quantize(x), dtype).isfinite().all())
    assert bool(nvfp4.qdq(x, NVFP4QDQConfig(decode="stored")).isfinite().all())


def test_a_maximum_below_the_weights_own_or_no_number_is_refused() -> None:
    x = torch.ones(2, 16)
    for call in (nvfp4.quantize, nvfp4.qdq):
        for amax in (math.nan, math.inf, -1.0, 0.0, 0.5):
            with pytest.raises(
                ValueError, match=r"w: amax .* is not a maximum of the whole tensor: this part alone has 1\.0"
            ):
                call(x, NVFP4QDQConfig(), amax=torch.tensor(amax), name="w")
        call(x, NVFP4QDQConfig(), amax=torch.tensor(1.0))
        call(x * 0, NVFP4QDQConfig(), amax=torch.tensor(0.0))
    with pytest.raises(ValueError, match="this part alone has"):
        nvfp4.quantize(torch.ones(2, 2, 16), NVFP4QDQConfig(), amax=torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_input_is_refused_with_name_and_first_index(bad: float) -> None:
    x = torch.zeros(3, 128)
    x[1, 7] = bad
    calls = [
        lambda: mxfp8.quantize(x, name="w"), lambda: mxfp4.quantize(x, name="w"), lambda: fp8_tensor.quantize(x, name="w"),
        lambda: fp8_block.quantize(x, name="w"), lambda: nvfp4.quantize(x, NVFP4QDQConfig(), name="w"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=r"w: (inf|-inf|nan) at index \[1, 7\]"):
            call()


def test_shapes_and_dtypes_outside_the_rules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"w: dtype torch\.int32"):
        mxfp4.quantize(torch.zeros(2, 32, dtype=torch.int32), name="w")
    with pytest.raises(ValueError, match="last dimension 24 is not a multiple of the block size 16"):
        nvfp4.quantize(torch.zeros(2, 24), NVFP4QDQConfig())
    with pytest.raises(ValueError, match="non-empty tensor of rank 2"):
        mxfp8.quantize(torch.zeros(0, 32))


def test_groups_are_quantised_by_their_own_maximum() -> None:
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 100.0, 1e-3]).view(
        3, 1, 1
    )
    for config in (CONFIGS["standard"], CONFIGS["4over6-448-MSE-fp16"], NVFP4QDQConfig(decode="stored")):
        whole = nvfp4.dequantize(nvfp4.quantize(x, config), config, torch.float32)
        assert torch.equal(whole, torch.stack([nvfp4.qdq(g, config) for g in x]))


def test_large_weights_are_quantised_in_chunks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(2))
    want = nvfp4.quantize(x, NVFP4QDQConfig())
    monkeypatch.setattr(nvfp4, "CHUNK", 128)
    got = nvfp4.quantize(x, NVFP4QDQConfig())
    assert torch.equal(got.weight, want.weight)
    assert torch.equal(nvfp4.dequantize(got, NVFP4QDQConfig()), nvfp4.dequantize(want, NVFP4QDQConfig()))


def test_mx_reciprocal_gives_the_scale_of_the_true_quotient_for_every_mantissa() -> None:
    """amax * fp32(1/6) and amax / 6 (and 448) never round to different powers of two: 2^23 mantissas, all of them."""
    for start in range(0, 1 << 23, 1 << 21):
        mantissa = np.arange(start, start + (1 << 21), dtype=np.int32) | 0x3F800000
        x = torch.from_numpy(mantissa.view(np.float32))
        for codec, top in ((mxfp4, 6.0), (mxfp8, 448.0)):
            assert torch.equal(up_exponent(x * codec.RECIPROCAL), up_exponent(x / top))


def up_exponent(v: torch.Tensor) -> torch.Tensor:
    b = v.view(torch.int32)
    return (b >> 23) + ((b & 0x7FFFFF) > 0).int()
