"""E2M1, E4M3, E8M0: every code, every tie and its neighbours, and libraries nobody here wrote."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.kernels import formats as f


def neighbours(values: torch.Tensor) -> torch.Tensor:
    """Each value and its two fp32 neighbours, both signs."""
    up = torch.nextafter(values, torch.full_like(values, math.inf))
    down = torch.nextafter(values, torch.full_like(values, -math.inf))
    every = torch.cat((values, up, down))
    return torch.cat((every, -every))


def ties(values: torch.Tensor) -> torch.Tensor:
    return (values[1:].double() + values[:-1].double()).div(2).float()


def test_all_16_e2m1_codes_decode_to_the_format_and_encode_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = f.e2m1_decode(codes)
    reference = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(values.numpy().view(np.int32), reference.view(np.int32))
    assert torch.equal(f.e2m1_encode(values), codes)


def test_all_256_e4m3_codes_equal_torch_and_encode_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = f.e4m3_decode(codes)
    assert torch.equal(values.nan_to_num(-1.0), codes.view(torch.float8_e4m3fn).float().nan_to_num(-1.0))
    assert torch.equal(f.e4m3_encode(values), codes)


def test_all_256_e8m0_codes_equal_torch_and_encode_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = f.e8m0_decode(codes)
    assert torch.equal(values.nan_to_num(-1.0), codes.view(torch.float8_e8m0fnu).float().nan_to_num(-1.0))
    assert torch.equal(f.e8m0_encode(values), codes)
    finite = codes[:255]
    assert torch.equal(f.e8m0_inverse(finite).double(), 2.0 ** (127.0 - finite.double()))


def test_every_e2m1_tie_and_its_two_neighbours_round_to_nearest_even() -> None:
    values = f.e2m1_decode(torch.arange(8, dtype=torch.uint8))
    x = neighbours(torch.cat((values, ties(values), torch.tensor([6.5, 7.0, 8.0, 1e30, f.FLT_MAX]))))
    want = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(f.e2m1_encode(x).numpy(), want)


def test_every_e4m3_tie_and_its_two_neighbours_round_to_nearest_even_and_saturate() -> None:
    values = f.e4m3_decode(torch.arange(127, dtype=torch.uint8))
    x = neighbours(torch.cat((values, ties(values), torch.tensor([456.0, 464.0, 465.0, 1e30, f.FLT_MAX, math.inf]))))
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(f.e4m3_encode(x), want)


def test_every_e8m0_code_rounds_up_from_just_above_it() -> None:
    exact = f.e8m0_decode(torch.arange(255, dtype=torch.uint8))
    above = torch.nextafter(exact, torch.full_like(exact, math.inf))
    below = torch.nextafter(exact, torch.zeros_like(exact))
    codes = torch.arange(255)
    assert torch.equal(f.e8m0_encode(above).int(), (codes + 1).clamp_max(254).int())
    assert torch.equal(f.e8m0_encode(below).int(), codes.int())


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0),
        (math.inf, 254),
        (math.nan, 255),
        (1e-45, 0),
        (2.0**-127, 0),
        (2.0**-126, 1),
        (f.FLT_MAX, 254),
        (1.0, 127),
        (1.5, 128),
    ],
)
def test_e8m0_edges(value: float, code: int) -> None:
    assert f.e8m0_encode(torch.tensor([value])).item() == code


def test_signed_zero_is_kept_by_both_element_formats() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    assert f.e2m1_encode(x).tolist() == [0, 8, 0, 8]
    assert f.e4m3_encode(x).tolist() == [0, 0x80, 0, 0x80]


def test_nan_keeps_its_sign_in_e4m3() -> None:
    assert f.e4m3_encode(torch.tensor([math.nan, -math.nan])).tolist() in ([0x7F, 0xFF], [0x7F, 0x7F], [0xFF, 0x7F])


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_packing_round_trips_with_the_even_column_in_the_low_nibble(codes: list[int]) -> None:
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = f.pack_e2m1(tensor)
    assert packed[0].item() == codes[0] | codes[1] << 4
    assert torch.equal(f.unpack_e2m1(packed), tensor)
    assert torch.equal(f.unpack_e2m1(packed.view(torch.int8)), tensor)


def test_odd_columns_cannot_be_packed_and_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        f.pack_e2m1(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TypeError, match="float32"):
        f.e4m3_encode(torch.zeros(2, dtype=torch.bfloat16))


def test_a_quarter_million_random_bit_patterns_equal_torch_and_ml_dtypes() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    x = x[torch.isfinite(x)]
    x = torch.cat((x, torch.randn(1 << 16) * 3))
    assert torch.equal(f.e4m3_encode(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    want = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(f.e2m1_encode(x).numpy(), want)
