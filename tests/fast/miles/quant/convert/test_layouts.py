"""Layouts that people have beside plain MXFP4: converted bit for bit as a plain reference says, or refused by name."""

from __future__ import annotations

import json
import math
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from miles.kernels.formats import e2m1_decode, e4m3_decode, e8m0_decode, unpack_e2m1
from miles.quant import contract
from miles.quant.cli import convert_app
from miles.quant.convert import fp8_merge
from miles.quant.convert.mxfp4_to_fp8 import convert
from miles.quant.errors import ConversionError

EXPERT = "model.layers.0.mlp.experts.0.up_proj"
DENSE = "model.layers.0.self_attn.q_proj"
TABLE = "model.embed_tokens"
GRID = sorted({Fraction(float(value)) for value in e4m3_decode(torch.arange(0x7F, dtype=torch.uint8))})


def mxfp4(m: int = 160, n: int = 192, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (m, n // 2), dtype=torch.uint8, generator=g),
        torch.randint(118, 124, (m, n // 32), dtype=torch.uint8, generator=g),
    )


def fp8(m: int, n: int, block_rows: int, *, low: int, high: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes without NaN, scale codes in [low, high)."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (m, n), dtype=torch.uint8, generator=g)
    codes |= torch.randint(0, 2, (m, n), dtype=torch.uint8, generator=g) << 7
    return codes, torch.randint(low, high, (-(-m // block_rows), n // 32), dtype=torch.uint8, generator=g)


def put(directory: Path, tensors: dict[str, torch.Tensor], config: dict | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config or {}))
    return directory


def expert(stem: str = EXPERT, **sizes: int) -> dict[str, torch.Tensor]:
    packed, scale = mxfp4(**sizes)
    return {f"{stem}.weight": packed, f"{stem}.weight_scale": scale.view(torch.float8_e8m0fnu)}


def beside(stem: str, codes: torch.Tensor, scale: torch.Tensor, *, inv: bool = True) -> dict[str, torch.Tensor]:
    return {
        f"{stem}.weight": codes.view(torch.float8_e4m3fn),
        f"{stem}.weight_scale{'_inv' if inv else ''}": scale.view(torch.float8_e8m0fnu),
    }


def read(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def exact(codes: torch.Tensor, scale: torch.Tensor, block_rows: int) -> list[list[Fraction]]:
    """The weight's values by the definition of the format."""
    values = e4m3_decode(codes)
    return [
        [
            Fraction(float(values[r, c])) * Fraction(2) ** (int(scale[r // block_rows, c // 32]) - 127)
            for c in range(codes.shape[1])
        ]
        for r in range(codes.shape[0])
    ]


def nearest(value: Fraction) -> Fraction:
    """The nearest E4M3 value, ties to the even code."""
    size = abs(value)
    best = min(range(len(GRID)), key=lambda i: (abs(GRID[i] - size), i % 2))
    return GRID[best] if value >= 0 else -GRID[best]


def merged(values: list[list[Fraction]]) -> tuple[int, list[list[Fraction]], int]:
    """(scale code, values after rounding, how many rounded) of one tile, by search."""
    largest = max(abs(value) for row in values for value in row)
    code = 0 if largest == 0 else next(c for c in range(255) if largest <= 448 * Fraction(2) ** (c - 127))
    factor = Fraction(2) ** (code - 127)
    rounded = [[nearest(value / factor) * factor for value in row] for row in values]
    pairs = zip(values, rounded, strict=True)
    return code, rounded, sum(a != b for left, right in pairs for a, b in zip(left, right, strict=True))


@given(
    seed=st.integers(0, 1 << 20),
    block_rows=st.sampled_from([1, 32]),
    rows=st.integers(1, 5),
    low=st.sampled_from([0, 1, 60, 120, 250]),
    spread=st.integers(1, 4),
)
def test_small_blocks_merge_as_the_reference_says(seed, block_rows, rows, low, spread):
    codes, scale = fp8(rows, 64, block_rows, low=low, high=min(low + spread * 5, 255), seed=seed)
    result = fp8_merge.merge(codes, scale, block_rows)
    code, rounded, lost = merged(exact(codes, scale, block_rows))
    assert int(result.scale[0, 0]) == code
    assert int(result.lossy.sum()) == lost
    back = e4m3_decode(result.q).double() * 2.0 ** (code - 127)
    assert [[Fraction(float(v)) for v in row] for row in back] == rounded
    assert torch.equal(result.q & 0x80, codes & 0x80), "the sign of zero, too, stays"


@pytest.mark.parametrize("block_rows", [1, 32])
def test_tiles_are_judged_one_by_one_at_ragged_edges(block_rows):
    codes, scale = fp8(200, 288, block_rows, low=120, high=122)
    codes[150, 140], scale[150 // block_rows, 4] = 0x01, 118
    codes[150, 141] = 0x7E
    result = fp8_merge.merge(codes, scale, block_rows)
    assert result.scale.shape == result.lossy.shape == (2, 3)
    for r in range(2):
        for c in range(3):
            inner = slice(r * 128, min(r * 128 + 128, 200)), slice(c * 128, min(c * 128 + 128, 288))
            rows = scale[r * 128 // block_rows : -(-min(r * 128 + 128, 200) // block_rows), c * 4 : c * 4 + 4]
            alone = fp8_merge.merge(codes[inner], rows, block_rows)
            assert torch.equal(alone.q, result.q[inner])
            assert (int(alone.scale), int(alone.lossy)) == (int(result.scale[r, c]), int(result.lossy[r, c]))


def test_an_element_that_is_no_number_is_named():
    codes, scale = fp8(4, 32, 1, low=120, high=121)
    codes[2, 7] = 0xFF
    with pytest.raises(ValueError, match=r"w: nan at index \[2, 7\]"):
        fp8_merge.merge(codes, scale, 1, name="w")


@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize("scale_dtype", ["e8m0", "fp32"])
def test_dense_blocks_and_tables_beside_mxfp4_are_converted(block_rows, scale_dtype, tmp_path):
    codes, scale = fp8(192, 160, block_rows, low=120, high=121)  # one scale: a tile rounds nothing
    table, table_scale = fp8(64, 96, 1, low=100, high=140, seed=3)
    tensors = {**expert(), **beside(DENSE, codes, scale), **beside(TABLE, table, table_scale)}
    if scale_dtype == "fp32":
        for name in (f"{DENSE}.weight_scale_inv", f"{TABLE}.weight_scale_inv"):
            tensors[name] = e8m0_decode(tensors[name].view(torch.uint8))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    report = convert(put(tmp_path / "in", tensors, config), tmp_path / "out")
    after = read(tmp_path / "out")
    assert report["lossless"]
    assert set(after) == set(tensors) - {f"{TABLE}.weight_scale_inv"}
    back = e4m3_decode(after[f"{DENSE}.weight"].view(torch.uint8)).double()
    factor = e8m0_decode(after[f"{DENSE}.weight_scale_inv"].view(torch.uint8)).double()
    assert factor.shape == (2, 2)
    back *= factor.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(back, fp8_merge.values(codes, scale, block_rows, name="q"))
    assert after[f"{TABLE}.weight"].dtype == torch.bfloat16
    assert torch.equal(after[f"{TABLE}.weight"].double(), fp8_merge.values(table, table_scale, 1, name="t"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["weight_block_size"] == [128, 128]
    assert contract.read(tmp_path / "out").tensors == (f"{EXPERT}.weight", f"{DENSE}.weight")
    assert {t["name"]: t["action"] for t in report["tensors"]} == {
        f"{EXPERT}.weight": "fp8_128x128",
        f"{DENSE}.weight": "fp8_128x128",
        f"{TABLE}.weight": "bf16",
    }


@pytest.mark.parametrize("block_rows", [1, 32])
def test_dense_blocks_that_would_round_follow_on_loss(block_rows, tmp_path):
    codes, scale = fp8(160, 128, block_rows, low=100, high=140)
    source = put(tmp_path / "in", {**expert(), **beside(DENSE, codes, scale)})
    with pytest.raises(ConversionError, match=rf"would round.*\n  {DENSE}\.weight tile \[0, 0\]: \d+ elements"):
        convert(source, tmp_path / "fail")
    assert not (tmp_path / "fail").exists()
    convert(source, tmp_path / "exact", on_loss="mxfp8")
    after = read(tmp_path / "exact")
    assert torch.equal(after[f"{DENSE}.weight"].view(torch.uint8), codes)
    rows = after[f"{DENSE}.weight_scale_inv"].view(torch.uint8)
    assert torch.equal(rows, scale.repeat_interleave(block_rows, 0)[:160])
    assert contract.read(tmp_path / "exact").exceptions == {f"{DENSE}.weight": "mxfp8 1x32"}
    report = convert(source, tmp_path / "report", on_loss="report")
    result = fp8_merge.merge(codes, scale, block_rows)
    (entry,) = [t for t in report["tensors"] if t["name"] == f"{DENSE}.weight"]
    assert entry["lossy_elements"] == int(result.lossy.sum()) > 0
    assert entry["max_abs_error"] == result.max_abs_error > 0
    assert not report["lossless"]


@pytest.mark.parametrize("code", [2, 247])
def test_a_table_that_bf16_does_not_hold_is_refused(code, tmp_path):
    table, scale = fp8(8, 64, 1, low=120, high=121)
    scale[3, 1] = code
    with pytest.raises(
        ConversionError, match=rf"scale code {code} at \[3, 1\]: the table has values that bf16 does not"
    ):
        convert(put(tmp_path / "in", {**expert(), **beside(TABLE, table, scale)}), tmp_path / "out")
    scale[3, 1] = 3 if code == 2 else 246
    table[3, 32:64] = 0x01 if code == 2 else 0x7E
    convert(put(tmp_path / "in", {**expert(), **beside(TABLE, table, scale)}), tmp_path / "fine")
    after = read(tmp_path / "fine")[f"{TABLE}.weight"]
    assert torch.equal(after.double(), fp8_merge.values(table, scale, 1, name="t"))


def test_packed_weights_of_compressed_tensors_become_plain_ones(tmp_path):
    packed, scale = mxfp4()
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["re:.*self_attn.*", "lm_head"],
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
        }
    }  # fmt: skip
    tensors = {
        f"{EXPERT}.weight_packed": packed,
        f"{EXPERT}.weight_scale": scale,
        f"{DENSE}.weight": torch.zeros(4, 4, dtype=torch.bfloat16),
    }
    convert(put(tmp_path / "packed", tensors, config), tmp_path / "out")
    convert(put(tmp_path / "plain", expert()), tmp_path / "reference")
    after, expected = read(tmp_path / "out"), read(tmp_path / "reference")
    assert set(after) == {f"{EXPERT}.weight", f"{EXPERT}.weight_scale", f"{DENSE}.weight"}
    for name in (f"{EXPERT}.weight", f"{EXPERT}.weight_scale"):
        assert torch.equal(after[name].view(torch.uint8), expected[name].view(torch.uint8))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "fp8"
    assert written["modules_to_not_convert"] == [DENSE]
    assert not {"config_groups", "format", "ignore"} & written.keys()


def write_f4(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_the_four_bit_type_of_safetensors_is_read(tmp_path):
    packed, scale = mxfp4()
    source = put(tmp_path / "in", {})
    write_f4(
        source / "model.safetensors",
        {
            f"{EXPERT}.weight": ("F4", [packed.shape[0], packed.shape[1] * 2], packed.numpy().tobytes()),
            f"{EXPERT}.weight_scale": ("F8_E8M0", list(scale.shape), scale.numpy().tobytes()),
        },
    )
    convert(source, tmp_path / "out")
    convert(put(tmp_path / "plain", expert()), tmp_path / "reference")
    after, expected = read(tmp_path / "out"), read(tmp_path / "reference")
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items())
    values = e2m1_decode(unpack_e2m1(packed)) * e8m0_decode(scale).repeat_interleave(32, 1)
    factor = e8m0_decode(after[f"{EXPERT}.weight_scale"].view(torch.uint8))
    wide = factor.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :192]
    assert torch.equal(e4m3_decode(after[f"{EXPERT}.weight"].view(torch.uint8)) * wide, values)


def test_safetensors_itself_writes_that_type_as_it_is_read_here(tmp_path):
    from miles.quant.convert.shards import Source

    packed, _ = mxfp4()
    save_file({"a.weight": packed.view(torch.float4_e2m1fn_x2)}, tmp_path / "model.safetensors")
    source = Source(tmp_path)
    assert source.tensors["a.weight"].spec.dtype == "F4"
    assert source.tensors["a.weight"].spec.shape == (packed.shape[0], packed.shape[1] * 2)
    assert torch.equal(source.load("a.weight"), packed)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            {
                "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(2, 8, 2, 16, dtype=torch.uint8),
                "model.layers.0.mlp.experts.gate_up_proj_scales": torch.zeros(2, 8, 2, dtype=torch.uint8),
            },
            "gate_up_proj_blocks: U8 [2, 8, 2, 16], in the layout gpt-oss MXFP4 (`*_blocks` with `*_scales`",
        ),
        (
            {
                f"{DENSE}.weight_packed": torch.zeros(8, 16, dtype=torch.uint8),
                f"{DENSE}.weight_scale": torch.zeros(8, 2).to(torch.float8_e4m3fn),
                f"{DENSE}.weight_global_scale": torch.ones(1),
            },
            "weight_packed: compressed-tensors NVFP4 (`*.weight_packed` with `*.weight_global_scale`) is not MXFP4",
        ),
        ({f"{DENSE}.weight_packed": torch.zeros(8, 16, dtype=torch.uint8)}, "weight_packed: needs exactly one scale"),
        (
            {f"{DENSE}.weight": torch.zeros(8, 40).to(torch.float8_e4m3fn), f"{DENSE}.scale": torch.ones(1, 2)},
            "with 32-wide blocks needs columns in a multiple of 32",
        ),
        (
            {f"{DENSE}.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), f"{DENSE}.scale": torch.full((2, 2), 0.3)},
            "is not a power of two",
        ),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_refused_by_its_layout(tensors, said, tmp_path):
    with pytest.raises(ConversionError) as error:
        convert(put(tmp_path / "in", {**expert(), **tensors}), tmp_path / "out")
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_other_conversions_name_the_layout_too(tmp_path):
    from miles.quant.convert import fp8_to_mxfp8

    codes, scale = fp8(128, 128, 128, low=120, high=121)
    dense = beside(DENSE, codes, scale[:, :1].contiguous())
    packed = {f"{EXPERT}.weight_packed": mxfp4()[0], f"{EXPERT}.weight_scale": mxfp4()[1]}
    source = put(tmp_path / "in", {**dense, **packed})
    with pytest.raises(ConversionError, match=r"in the layout compressed-tensors \(`\*\.weight_packed`\)"):
        fp8_to_mxfp8.convert(source, tmp_path / "out")


def test_a_file_that_the_index_does_not_list_is_named(tmp_path):
    source = put(tmp_path / "in", expert())
    index = {"weight_map": dict.fromkeys(expert(), "model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": torch.zeros(2)}, source / "consolidated.safetensors")
    done = CliRunner().invoke(convert_app, ["mxfp4-to-fp8", str(source), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "not converted, files that the source's index does not list: consolidated.safetensors" in done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["files_not_in_the_index"] == ["consolidated.safetensors"]
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()
    assert math.isfinite(report["totals"]["max_abs_error"])
