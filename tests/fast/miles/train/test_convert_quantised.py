"""Conversions between training checkpoints and packed NVFP4 folders."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from miles.data.tokenizer import build_char_tokenizer
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.models.errors import ModelError
from miles.models.hf_files import HFCheckpoint
from miles.quant import contract
from miles.quant.convert import to_nvfp4
from miles.quant.errors import ContractMismatch
from miles.train.convert import checkpoint_to_hf, checkpoint_to_nvfp4, hf_to_checkpoint
from miles.train.errors import CheckpointError


@pytest.fixture
def model(tmp_path):
    """A small model with routed experts."""
    build_char_tokenizer("0123456789=", tmp_path / "tokenizer")
    shape = ModelShape(expert_ffn_hidden_size=64)
    return create_checkpoint(
        tmp_path / "m", family="qwen3_moe", shape=shape, tokenizer_dir=tmp_path / "tokenizer", seed=0
    )


def masters(model, config, *, ignore=(), without=""):
    """Say in the model's folder that it was trained with this rounding; what begins with `without` was not."""
    weights = HFCheckpoint(model)
    names = weights.names()
    weights.close()
    routed = [name for name in names if ".experts." in name and not (without and name.startswith(without))]
    made = contract.nvfp4_contract(config, routed, source_digest="s", producer={}, ignore=ignore)
    contract.write(model, made.model_copy(update={"weights": "masters"}))


def test_a_checkpoint_is_packed_as_it_was_trained_in_one_step_or_in_two(model, tmp_path):
    config = NVFP4QDQConfig(True, error_mode=ErrorMode.MSE)
    masters(model, config)
    hf_to_checkpoint(model, tmp_path / "run")
    packed = checkpoint_to_nvfp4(tmp_path / "run", tmp_path / "packed", tokenizer_dir=model)
    plain = checkpoint_to_hf(tmp_path / "run", tmp_path / "plain")
    to_nvfp4.convert(plain, tmp_path / "converted", config=config)
    live = {name: value for path in packed.glob("*.safetensors") for name, value in load_file(path).items()}
    two_steps = {
        name: value
        for path in (tmp_path / "converted").glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    assert {name for name in two_steps if name not in live} == {n for n in two_steps if n.endswith("input_scale")}
    assert all(torch.equal(live[name].view(torch.uint8), two_steps[name].view(torch.uint8)) for name in live)
    contract.require_equal(contract.read(packed), contract.read(tmp_path / "converted"), where="test")
    assert (packed / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_what_was_trained_unrounded_stays_so(model, tmp_path):
    masters(model, NVFP4QDQConfig(), ignore=("model.layers.0.",), without="model.layers.0.")
    hf_to_checkpoint(model, tmp_path / "run")
    packed = contract.read(checkpoint_to_nvfp4(tmp_path / "run", tmp_path / "packed"))
    assert packed.ignore == ("model.layers.0.",)
    assert {name.split(".")[2] for name in packed.tensors} == {"1"}


def test_a_contract_that_does_not_name_the_models_experts_is_refused(model, tmp_path):
    masters(model, NVFP4QDQConfig(), without="model.layers.0.")
    hf_to_checkpoint(model, tmp_path / "run")
    with pytest.raises(ContractMismatch, match=r"export to .*packed: "):
        checkpoint_to_nvfp4(tmp_path / "run", tmp_path / "packed")
    assert not list((tmp_path / "packed").iterdir())


def test_a_checkpoint_without_a_rounding_of_its_own_is_not_packed(model, tmp_path):
    hf_to_checkpoint(model, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"iter_0: was trained without fake quantisation.*bf16-to-nvfp4"):
        checkpoint_to_nvfp4(tmp_path / "run", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_packed_experts_are_refused_with_what_to_give_instead(model, tmp_path):
    to_nvfp4.convert(model, tmp_path / "nvfp4")
    with pytest.raises(ModelError, match=r"config\.json says modelopt NVFP4; .*; give the bf16") as raised:
        hf_to_checkpoint(tmp_path / "nvfp4", tmp_path / "checkpoints")
    assert len(str(raised.value)) < 400
    assert not (tmp_path / "checkpoints").exists()
