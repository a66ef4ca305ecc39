"""No conversion keeps a quantised tensor that its config.json does not describe: it is decoded, or refused by name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant import contract
from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8
from miles.quant.contract import nvfp4_contract
from miles.quant.convert import bf16_to_fp8, fp8_to_mxfp8, mxfp4_to_fp8, to_nvfp4
from miles.quant.errors import ContractMismatch, ConversionError, QuantConfigError

requantise = partial(to_nvfp4.convert, kind="requantise")
Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0."
SHARED = f"{LAYER}mlp.shared_expert.up_proj.weight"
QUERY = f"{LAYER}self_attn.q_proj.weight"
EXPERTS = tuple(f"{LAYER}mlp.experts.0.{half}_proj.weight" for half in ("down", "gate", "up"))
CONFIG = NVFP4QDQConfig(True, error_mode=ErrorMode.MSE, error_use_fast_math=True)


def write(directory: Path, tensors: Tensors, **config: object) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **config}))
    return directory


def read(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def weight(seed: int, rows: int = 32, cols: int = 64) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def experts() -> Tensors:
    return {name: weight(i) for i, name in enumerate(EXPERTS)}


def as_mxfp4(name: str, seed: int = 7, scale: str = "weight_scale") -> Tensors:
    packed, code = mxfp4.quantize(weight(seed))
    return {name: packed, name.removesuffix("weight") + scale: code}


def as_fp8_tensor(name: str, seed: int = 7) -> Tensors:
    codes, scale = fp8_tensor.quantize(weight(seed))
    return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale": scale}


def as_fp8_block(name: str, seed: int = 7, scale: str = "weight_scale_inv") -> Tensors:
    codes, tile_scale = fp8_block.quantize(weight(seed), scale="e8m0")
    stored = tile_scale.view(torch.float8_e8m0fnu)
    return {name: codes.view(torch.float8_e4m3fn), name.removesuffix("weight") + scale: stored}


def as_mxfp8(name: str, seed: int = 7) -> Tensors:
    codes, scale = mxfp8.quantize(weight(seed))
    return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": scale.view(torch.float8_e8m0fnu)}


def as_packed_experts(name: str) -> Tensors:
    return {
        f"{name}_blocks": torch.zeros(2, 8, 8, dtype=torch.uint8),
        f"{name}_scales": torch.zeros(2, 8, dtype=torch.uint8),
    }


def rounded(codec, **options):
    """weight -> what its stored form decodes to."""
    return lambda value: codec.dequantize(*codec.quantize(value, **options), value.dtype)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (as_mxfp4, rounded(mxfp4)),
        (partial(as_mxfp4, scale="scale"), rounded(mxfp4)),
        (as_fp8_tensor, rounded(fp8_tensor)),
        (partial(as_fp8_block, scale="scale"), rounded(fp8_block, scale="e8m0")),
        (as_mxfp8, rounded(mxfp8)),
    ],
)
@pytest.mark.parametrize("name", [SHARED, QUERY])
def test_requantise_decodes_every_known_form_to_bf16(name: str, stored, expected, tmp_path: Path) -> None:
    activation = {name.removesuffix("weight") + "input_scale": torch.ones(1)}
    source = write(tmp_path / "source", {**experts(), **stored(name), **activation})
    requantise(source, tmp_path / "out")
    after = read(tmp_path / "out")
    assert torch.equal(after[name], expected(weight(7)))
    assert not [n for n in after if n.startswith(name.removesuffix("weight")) and n != name]
    assert contract.read(tmp_path / "out").tensors == EXPERTS


def test_requantise_takes_experts_of_every_known_form(tmp_path: Path) -> None:
    down, gate, up = EXPERTS
    source = write(tmp_path / "source", {**as_mxfp4(down, 1), **as_mxfp8(gate, 2), **as_fp8_tensor(up, 3)})
    requantise(source, tmp_path / "out")
    plain = write(
        tmp_path / "plain",
        {
            name: codec.dequantize(*codec.quantize(weight(seed)), torch.bfloat16)
            for name, codec, seed in ((down, mxfp4, 1), (gate, mxfp8, 2), (up, fp8_tensor, 3))
        },
    )
    to_nvfp4.convert(plain, tmp_path / "wanted")
    got, wanted = read(tmp_path / "out"), read(tmp_path / "wanted")
    assert set(got) == set(wanted)
    assert all(torch.equal(got[n].view(torch.uint8), wanted[n].view(torch.uint8)) for n in got)


def test_requantise_reads_packed_experts_that_it_wrote(tmp_path: Path) -> None:
    packed = {f"{LAYER}mlp.experts.down_proj": torch.stack([weight(1), weight(2)])}
    to_nvfp4.convert(write(tmp_path / "source", packed), tmp_path / "once")
    requantise(tmp_path / "once", tmp_path / "twice")
    assert set(read(tmp_path / "twice")) == set(read(tmp_path / "once"))


UNKNOWN = {
    "a scale per row": lambda: {QUERY: torch.zeros(32, 64).to(torch.float8_e4m3fn), f"{QUERY}_scale": torch.ones(32)},
    "no scale": lambda: {QUERY: torch.zeros(32, 64).to(torch.float8_e4m3fn)},
    "another FP8": lambda: {QUERY: torch.zeros(32, 64).to(torch.float8_e5m2), f"{QUERY}_scale": torch.ones(1)},
    "two scales": lambda: {**as_mxfp4(QUERY), **as_mxfp4(QUERY, scale="scale")},
    "int8": lambda: {QUERY: torch.zeros(32, 64, dtype=torch.int8), f"{QUERY}_scale": torch.ones(1)},
}


@pytest.mark.parametrize("form", list(UNKNOWN))
def test_requantise_refuses_a_form_that_it_does_not_know(form: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**experts(), **UNKNOWN[form]()})
    with pytest.raises(ConversionError, match=rf"{QUERY}.*requantise reads NVFP4 and FP8|but {QUERY} needs"):
        requantise(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored", [as_mxfp4, as_fp8_tensor, as_fp8_block, as_mxfp8])
@pytest.mark.parametrize("convert", [to_nvfp4.convert, partial(bf16_to_fp8.convert, scope="experts")])
def test_conversions_from_bf16_refuse_what_is_quantised(convert, stored, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**experts(), **stored(QUERY)})
    with pytest.raises(
        ConversionError, match=rf"{QUERY}: .* is quantised and would be kept so; .*miles convert requantise"
    ):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fp4_that_is_not_read_is_refused_beside_fp4_that_is(tmp_path: Path) -> None:
    source = write(
        tmp_path / "source", {**as_mxfp4(EXPERTS[0]), **as_packed_experts(f"{LAYER}mlp.experts.gate_up_proj")}
    )
    with pytest.raises(ConversionError) as error:
        mxfp4_to_fp8.convert(source, tmp_path / "out")
    for name in (
        "gate_up_proj_blocks: U8 [2, 8, 8], in the layout gpt-oss MXFP4",
        "gate_up_proj_scales: U8 [2, 8], in the",
    ):
        assert name in str(error.value)
    assert not (tmp_path / "out").exists()


def test_fp8_of_the_results_own_format_stays_beside_converted_fp4(tmp_path: Path) -> None:
    kept = as_fp8_block(QUERY, scale="scale")
    source = write(tmp_path / "source", {**as_mxfp4(EXPERTS[0], scale="scale"), **kept})
    mxfp4_to_fp8.convert(source, tmp_path / "out")
    after = read(tmp_path / "out")
    assert all(torch.equal(after[n].view(torch.uint8), t.view(torch.uint8)) for n, t in kept.items())


def test_fp8_of_another_format_is_refused_beside_fp4(tmp_path: Path) -> None:
    for number, (other, text) in enumerate(
        [
            (as_fp8_tensor(QUERY), f"{QUERY}: F8_E4M3"),
            ({**as_fp8_block(QUERY), f"{QUERY}_scale_inv": torch.full((1, 1), 0.3)}, "is not a power of two"),
        ]
    ):
        source = write(tmp_path / f"source{number}", {**as_mxfp4(EXPERTS[0]), **other})
        with pytest.raises(ConversionError, match=text):
            mxfp4_to_fp8.convert(source, tmp_path / "out")


def test_fp8_that_is_not_read_is_refused_beside_fp8_that_is(tmp_path: Path) -> None:
    packed = f"{LAYER}mlp.experts.gate_up_proj"
    other = {packed: torch.zeros(2, 32, 64).to(torch.float8_e4m3fn), f"{packed}_scale": torch.ones(2, 1, 1)}
    source = write(tmp_path / "source", {**as_fp8_block(QUERY), **other})
    with pytest.raises(ConversionError, match=rf"{packed}: F8_E4M3 \[2, 32, 64\] is quantised and would be kept so"):
        fp8_to_mxfp8.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_config_names_the_weights_that_on_loss_kept_in_mxfp8(mxfp4_checkpoint, tmp_path: Path) -> None:
    mxfp4_to_fp8.convert(mxfp4_checkpoint(lossy=True), tmp_path / "out", on_loss="mxfp8")
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantization["mxfp8_modules"] == ["model.layers.1.mlp.experts.0.up_proj"]
    mxfp4_to_fp8.convert(mxfp4_checkpoint(name="exact"), tmp_path / "plain")
    assert "mxfp8_modules" not in (tmp_path / "plain" / "config.json").read_text()


def broken(tensors: Tensors, scale: str, value: float) -> Tensors:
    tensors[scale].view(torch.uint8 if value == 255 else tensors[scale].dtype).view(-1)[0] = value
    return tensors


@pytest.mark.parametrize(
    ("stored", "scale", "text"),
    [
        (as_fp8_tensor, f"{SHARED}_scale", "nan at index \\[0\\]"),
        (as_mxfp4, f"{SHARED}_scale", "NaN at index \\[0, 0\\]"),
        (as_mxfp8, f"{SHARED}_scale_inv", "NaN at index \\[0, 0\\]"),
    ],
)
def test_a_scale_that_is_no_number_is_refused_before_anything_is_written(stored, scale, text, tmp_path: Path) -> None:
    value = float("nan") if "nan" in text else 255
    source = write(tmp_path / "source", {**experts(), **broken(stored(SHARED), scale, value)})
    with pytest.raises(ConversionError, match=rf"{scale}: {text}.*that weight is damaged"):
        requantise(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [SHARED, *EXPERTS])
def test_a_decoded_weight_that_is_no_number_is_named(name: str, tmp_path: Path) -> None:
    stored = as_fp8_block(name)
    stored[name].view(torch.uint8)[3, 5] = 0x7F
    source = write(tmp_path / "source", {**experts(), **stored})
    with pytest.raises(ConversionError, match=rf"model\.safetensors: {name}: nan at index \[3, 5\]"):
        requantise(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_fp8_to_mxfp8_names_a_weight_that_is_no_number(tmp_path: Path) -> None:
    stored = as_fp8_block(QUERY)
    stored[QUERY].view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(ConversionError, match=rf"{QUERY}: nan at index \[3, 5\]"):
        fp8_to_mxfp8.convert(write(tmp_path / "source", stored), tmp_path / "out")


def test_all_faults_of_scales_are_listed(tmp_path: Path) -> None:
    names = [f"{LAYER}mlp.experts.{i}.up_proj.weight" for i in range(3)]
    fp4 = {k: v for n in names for k, v in broken(as_mxfp4(n), f"{n}_scale", 255).items()}
    fp8 = {k: v for n in names for k, v in {**as_fp8_block(n), f"{n}_scale_inv": torch.full((1, 1), 0.3)}.items()}
    odd = {n: torch.zeros(32, 64).to(torch.float8_e4m3fn) for n in names}
    odd |= {f"{n}_scale_inv": torch.zeros(5, 5) for n in names}
    for number, (convert, tensors, text) in enumerate(
        [
            (mxfp4_to_fp8.convert, {**fp4, "a.scale": torch.zeros(1)}, "{}_scale: scale code 255"),
            (
                fp8_to_mxfp8.convert,
                {**fp8, "a.weight": torch.zeros(2, 2), "a.weight_scale": torch.zeros(1)},
                "{}_scale_inv: scale 0.3",
            ),
            (requantise, odd, "{}_scale_inv is F32 [5, 5]"),
            (requantise, fp4, "{}_scale: NaN at index [0, 0]"),
        ]
    ):
        with pytest.raises(ConversionError) as error:
            convert(write(tmp_path / f"source{number}", tensors), tmp_path / "out")
        for name in names:
            assert text.format(name) in str(error.value)
        assert ("a." in str(error.value)) == any(n.startswith("a.") for n in tensors)


@pytest.mark.parametrize("stray", [f"{QUERY}_scale", f"{SHARED}_scale_inv"])
def test_stray_scales_are_refused(stray: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**experts(), QUERY: weight(3), stray: torch.ones(1)})
    for convert in (to_nvfp4.convert, requantise, partial(bf16_to_fp8.convert, scope="experts")):
        with pytest.raises(
            ConversionError, match=rf"{stray}: scale of a weight that is not quantised; remove the stray"
        ):
            convert(source, tmp_path / "out")


def test_halves_of_different_shapes_are_refused(tmp_path: Path) -> None:
    down, gate, up = EXPERTS
    source = write(tmp_path / "source", {down: weight(0), gate: weight(1), up: weight(2, rows=48)})
    with pytest.raises(ConversionError, match=rf"{gate}: shape \[32, 64\], but its other half {up} has \[48, 64\]"):
        to_nvfp4.convert(source, tmp_path / "out")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """What a trainer with fake quantisation exports."""
    source = write(tmp_path / "trained", experts())
    contract.write(source, nvfp4_contract(CONFIG, EXPERTS, source_digest="s", producer={}, weights="masters"))
    return source


def test_a_trained_model_is_not_rounded_otherwise_by_another_conversion(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ContractMismatch,
        match=r"trained with nvfp4 rounding, bf16-to-fp8 would round it to fp8_block; use .*bf16-to-nvfp4",
    ):
        bf16_to_fp8.convert(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (trained / contract.FILE).unlink()
    bf16_to_fp8.convert(trained, tmp_path / "out")


def test_a_trained_model_whose_contract_is_broken_is_not_rounded_as_if_it_had_none(
    trained: Path, tmp_path: Path
) -> None:
    (trained / contract.FILE).write_text("{")
    for convert in (to_nvfp4.convert, bf16_to_fp8.convert, requantise):
        with pytest.raises(
            QuantConfigError, match=r"how these weights must be rounded, and cannot be read .*copy it again"
        ):
            convert(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_requantise_repairs_a_checkpoint_whose_contract_is_broken(tmp_path: Path) -> None:
    to_nvfp4.convert(write(tmp_path / "source", experts()), tmp_path / "packed", config=CONFIG)
    (tmp_path / "packed" / contract.FILE).write_text("{")
    with pytest.raises(QuantConfigError, match="miles convert requantise"):
        contract.read(tmp_path / "packed")
    requantise(tmp_path / "packed", tmp_path / "again", config=CONFIG)
    assert contract.read(tmp_path / "again").nvfp4() == CONFIG


def test_a_trained_model_stays_one_beside_a_quantised_tensor(trained: Path, tmp_path: Path) -> None:
    save_file({**experts(), **as_mxfp4(QUERY)}, trained / "model.safetensors")
    with pytest.raises(ContractMismatch, match=r"trained with fake quantisation; .*four_over_six\.on"):
        requantise(trained, tmp_path / "out")


def test_requantise_notices_a_shard_of_another_conversion(tmp_path: Path) -> None:
    source = write(tmp_path / "source", experts())
    to_nvfp4.convert(source, tmp_path / "packed", config=CONFIG)
    to_nvfp4.convert(source, tmp_path / "other")
    shard = "model.safetensors"
    (tmp_path / "packed" / shard).write_bytes((tmp_path / "other" / shard).read_bytes())
    with pytest.raises(ContractMismatch, match=r"model\.safetensors: .*not written together"):
        requantise(tmp_path / "packed", tmp_path / "again")


def test_requantise_repairs_quantised_shared_experts_that_have_a_contract(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**experts(), SHARED: weight(5)})
    bf16_to_fp8.convert(source, tmp_path / "fp8")
    requantise(tmp_path / "fp8", tmp_path / "again")
    assert read(tmp_path / "again")[SHARED].dtype == torch.bfloat16
