"""Sources that are odd and not damaged: tensors without elements, scalars, strange names, strange config.json fields."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.quant.convert import bf16_to_fp8, fp8_to_mxfp8, mxfp4_to_fp8, to_nvfp4
from miles.quant.errors import ConversionError

DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"
CONVERSIONS = {
    "mxfp4-to-fp8": mxfp4_to_fp8.convert,
    "bf16-to-nvfp4": to_nvfp4.convert,
    "bf16-to-fp8": bf16_to_fp8.convert,
    "fp8-to-mxfp8": fp8_to_mxfp8.convert,
}
WEIGHTS = {
    "mxfp4-to-fp8": {DOWN: torch.zeros(32, 32, dtype=torch.uint8), f"{DOWN}_scale": torch.zeros(32, 2, dtype=torch.uint8)},
    "bf16-to-nvfp4": {DOWN: torch.ones(32, 64, dtype=torch.bfloat16)},
    "bf16-to-fp8": {DOWN: torch.ones(32, 64, dtype=torch.bfloat16)},
    "fp8-to-mxfp8": {DOWN: torch.ones(32, 64).to(torch.float8_e4m3fn), f"{DOWN}_scale_inv": torch.ones(1, 1)},
}  # fmt: skip


def write(directory: Path, tensors: dict[str, torch.Tensor], config: object = None) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config or {"num_hidden_layers": 1}))
    return directory


@pytest.mark.parametrize("command", list(CONVERSIONS))
def test_tensors_without_elements_and_scalars_are_copied(command: str, tmp_path: Path) -> None:
    kept = {"empty": torch.zeros(0, 4), "none": torch.zeros(0, dtype=torch.int64), "scalar": torch.tensor(3.5)}
    CONVERSIONS[command](write(tmp_path / "source", {**WEIGHTS[command], **kept}), tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (after[name].dtype, after[name].tolist(), after[name].shape) for name in kept} == {
        name: (tensor.dtype, tensor.tolist(), tensor.shape) for name, tensor in kept.items()
    }


@pytest.mark.parametrize("command", list(CONVERSIONS))
@pytest.mark.parametrize("shape", [(0, 64), (32, 0)])
def test_weights_without_elements_are_refused_before_anything_is_written(
    command: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    tensors = dict(WEIGHTS[command])
    tensors[DOWN] = torch.zeros(shape).to(tensors[DOWN].dtype)
    with pytest.raises(ConversionError, match=rf"{DOWN}: shape \[{shape[0]}, {shape[1]}\]"):
        CONVERSIONS[command](write(tmp_path / "source", tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", list(CONVERSIONS))
def test_a_tensor_name_that_is_no_text_is_refused(command: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", WEIGHTS[command])
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length].replace(b'experts.0.down_proj.weight"', b'experts.0.down_proj.\\ud800.weight"')
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    with pytest.raises(ConversionError, match=r"tensor name '.*\\ud800\.weight' is not text"):
        CONVERSIONS[command](source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["mxfp4-to-fp8", "fp8-to-mxfp8"])
def test_a_quantization_config_of_null_is_none_and_of_another_kind_is_named(command: str, tmp_path: Path) -> None:
    none = write(tmp_path / "none", WEIGHTS[command], {"quantization_config": None})
    CONVERSIONS[command](none, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"]
    for value in ([], "fp8", 5):
        other = write(tmp_path / f"source {value}", WEIGHTS[command], {"quantization_config": value})
        with pytest.raises(
            ConversionError, match=r"config\.json: quantization_config is a \w+, a JSON object is needed"
        ):
            CONVERSIONS[command](other, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_text_config_that_is_no_object_has_no_layers(tmp_path: Path) -> None:
    source = write(tmp_path / "source", WEIGHTS["bf16-to-nvfp4"], {"text_config": ["a"]})
    with pytest.raises(ConversionError, match=r"--bf16-first-layers .* has no num_hidden_layers"):
        to_nvfp4.convert(source, tmp_path / "out", bf16_first_layers=1)


def test_a_config_of_too_many_levels_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "source", WEIGHTS["bf16-to-fp8"])
    (source / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConversionError, match=r"config\.json: not JSON"):
        bf16_to_fp8.convert(source, tmp_path / "out")
