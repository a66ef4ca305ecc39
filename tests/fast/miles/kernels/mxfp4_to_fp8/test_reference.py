"""MXFP4 to FP8 in integers: where it is exact, what it loses, and the edges of the exponent range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles.kernels.formats import E2M1_VALUES, e2m1_decode, e4m3_decode, e4m3_encode, e8m0_decode, unpack_e2m1
from miles.kernels.mxfp4_to_fp8 import reference
from miles.kernels.mxfp4_to_fp8.reference import BLOCK, convert, e4m3_of_half_units


def weight(codes: list[list[int]], scales: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of blocks per scale row: block j of row i holds codes[i] repeated."""
    rows = []
    for row_codes, row_scales in zip(codes, scales, strict=True):
        row = torch.tensor(row_codes, dtype=torch.uint8).repeat(len(row_scales) * BLOCK // len(row_codes))
        rows.append(row[0::2] | row[1::2] << 4)
    return torch.stack(rows), torch.tensor(scales, dtype=torch.uint8)


def original(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return e2m1_decode(unpack_e2m1(packed)).double() * (2.0 ** (scale.double() - 127)).repeat_interleave(BLOCK, 1)


def converted(result: reference.Converted) -> torch.Tensor:
    factor = 2.0 ** (result.scale.double() - 127)
    rows, cols = result.q.shape
    return e4m3_decode(result.q).double() * factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


def test_every_shift_and_code_equals_the_float_rounding() -> None:
    for shift in range(-13, 7):
        for half_units in reference.HALF_UNITS:
            value = half_units / 2 * 2.0**shift
            code, exact = e4m3_of_half_units(half_units, shift)
            assert code == int(e4m3_encode(torch.tensor([value]))), (half_units, shift)
            assert exact == (float(e4m3_decode(torch.tensor([code], dtype=torch.uint8))) == value)


LOST = {13: set(), 14: set(), 15: {0.5, 1.5}, 16: {0.5, 1.0, 1.5, 3.0}, 17: set(E2M1_VALUES) - {0.0, 4.0}}
LOST |= {18: set(E2M1_VALUES) - {0.0}, 19: set(E2M1_VALUES) - {0.0}}


@pytest.mark.parametrize("k", range(13, 20))
def test_lossless_boundary(k: int) -> None:
    """Two rows: one sets the tile's scale (k = 0), the other has every code at the given k."""
    packed, scale = weight([[2, 0], list(range(16))], [[120], [120 - k]])
    result = convert(packed, scale)
    assert int(result.scale) == 114
    assert int(result.max_k) == k
    values = e2m1_decode(torch.arange(16, dtype=torch.uint8))
    per_element = sum(float(v) in LOST[k] or float(-v) in LOST[k] for v in values)
    assert int(result.lossy) == per_element * 2
    assert int((converted(result) != original(packed, scale)).sum()) == per_element * 2


def test_the_largest_value_meets_384_and_not_more() -> None:
    packed, scale = weight([[7, 15]], [[120]])
    result = convert(packed, scale)
    assert set(e4m3_decode(result.q).flatten().tolist()) == {384.0, -384.0}
    assert torch.equal(converted(result), original(packed, scale))


@pytest.mark.parametrize("top", [0, 3, 6, 7])
def test_tiny_exponents_clamp(top: int) -> None:
    """c_max below 6 gives C = 0 and smaller shifts, still exact."""
    packed, scale = weight([list(range(16)), list(range(16))], [[top], [0]])
    result = convert(packed, scale)
    assert int(result.scale) == max(top - 6, 0)
    assert int(result.lossy) == 0
    assert torch.equal(converted(result), original(packed, scale))


def test_zero_blocks_do_not_choose_the_scale_and_keep_their_signs() -> None:
    packed, scale = weight([[0, 8], [2, 3]], [[250], [100]])
    result = convert(packed, scale)
    assert int(result.scale) == 94
    assert int(result.max_k) == 0
    assert result.q[0].tolist() == [0x00, 0x80] * 16


def test_all_zero_tile_has_scale_zero() -> None:
    packed, scale = weight([[8, 0]], [[200]])
    result = convert(packed, scale)
    assert (int(result.scale), int(result.max_k), int(result.lossy)) == (0, -1, 0)


def test_edge_tiles_are_padded_for_the_scale_and_not_for_the_values() -> None:
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (200, 80), dtype=torch.uint8, generator=g)
    scale = torch.randint(118, 124, (200, 5), dtype=torch.uint8, generator=g)
    result = convert(packed, scale)
    assert tuple(result.q.shape) == (200, 160)
    assert tuple(result.scale.shape) == (2, 2)
    assert torch.equal(converted(result), original(packed, scale))


def test_nan_scale_refused_with_its_place_and_tile() -> None:
    packed = torch.zeros(300, 64, dtype=torch.uint8)
    scale = torch.full((300, 4), 120, dtype=torch.uint8)
    scale[257, 3] = 255
    with pytest.raises(ValueError, match=r"scale code 255 \(NaN\) at \[257, 3\], tile \[2, 0\]"):
        convert(packed, scale)


@pytest.mark.parametrize(
    ("packed", "scale", "text"),
    [
        (torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8), "packed must be uint8 or int8"),
        (torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 1), "scale must be uint8"),
        (torch.zeros(2, 24, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8), "in a multiple of 32"),
        (torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8), r"scale must be \(2, 2\)"),
    ],
)
def test_wrong_inputs_are_refused(packed: torch.Tensor, scale: torch.Tensor, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        convert(packed, scale)


def test_random_weights_agree_with_float_arithmetic_where_it_is_exact() -> None:
    g = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (256, 128), dtype=torch.uint8, generator=g).view(torch.int8)
    scale = torch.randint(90, 130, (256, 8), dtype=torch.uint8, generator=g)
    result = convert(packed, scale.view(torch.float8_e8m0fnu))
    exact = original(packed, scale) / (
        e8m0_decode(result.scale).double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    )
    assert np.array_equal(result.q.numpy(), e4m3_encode(exact.float()).numpy())
    assert int(result.lossy.sum()) == int((converted(result) != original(packed, scale)).sum())
