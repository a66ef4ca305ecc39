"""A folder of quantised weights is refused in one line, by every reader of model folders."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.models.errors import ModelError
from miles.models.hf_files import HFCheckpoint

NAME = "lm_head.weight"


def pack(model_dir, dtype=torch.uint8) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    save_file({**tensors, NAME: tensors[NAME].to(dtype)}, model_dir / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_eight_bits_are_refused_by_name(dtype, model_dir):
    HFCheckpoint(model_dir)
    pack(model_dir, dtype)
    with pytest.raises(ModelError, match=rf"holds quantised weights \({NAME} is .*8.*\), which .*; give the bf16"):
        HFCheckpoint(model_dir)


@pytest.mark.parametrize(
    ("quantization", "contract", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, "config.json says modelopt NVFP4; "),
        ({"quant_method": "fp8"}, {"format": "fp8_block"}, "config.json says fp8; "),
        (None, {"format": "mxfp8"}, "its contract says mxfp8; "),
        ([], [], ""),
        ({}, {}, ""),
    ],
)
def test_the_format_is_said_where_the_folder_says_it(quantization, contract, said, model_dir):
    pack(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    if contract is not None:
        (model_dir / "quantization_contract.json").write_text(json.dumps(contract))
    with pytest.raises(ModelError) as raised:
        HFCheckpoint(model_dir)
    assert f"holds quantised weights ({said}{NAME} is U8)" in str(raised.value)


def test_a_broken_contract_does_not_hide_the_refusal(model_dir):
    pack(model_dir)
    (model_dir / "quantization_contract.json").write_bytes(b"\xff{")
    with pytest.raises(ModelError, match="holds quantised weights"):
        HFCheckpoint(model_dir)
