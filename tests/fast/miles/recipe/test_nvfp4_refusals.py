"""What an NVFP4 run refuses at the start of its actors is refused by `recipe check`, `--dry-run` and `train` before."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from miles.config import ConfigError
from miles.data.tokenizer import build_char_tokenizer
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.orchestrate.dry_run import describe
from miles.orchestrate.startable import check_start
from miles.quant import contract
from miles.quant.contract import nvfp4_contract
from miles.quant.convert import bf16_to_fp8, to_nvfp4
from miles.quant.scope import Scope
from miles.recipe import load
from miles.recipe.rules import check_or_raise

ROOT = Path(__file__).resolve().parents[4]
TINY = ROOT / "recipes" / "nvfp4_w4a16_tiny.yaml"


def both(option: str) -> list[str]:
    return [f"quant.nvfp4.{option}", f"engine.nvfp4_experts.{option}"]


def refusal(*sets: str, recipe: Path = TINY) -> str:
    loaded = load(recipe, sets)
    with pytest.raises(ConfigError) as raised:
        describe(loaded, sets, Console(quiet=True))
    assert raised.value.exit_code == 2
    with pytest.raises(ConfigError):
        check_or_raise(loaded)
    assert "Traceback" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NVTE_USE_FAST_MATH", "1", "NVTE_USE_FAST_MATH='1': allowed are 0 and unset, since fast math changes"),
        (
            "NVTE_NVFP4_4OVER6",
            "sometimes",
            "NVTE_NVFP4_4OVER6='sometimes': allowed are none, weights, activations, all",
        ),
        (
            "NVTE_NVFP4_4OVER6",
            "weights",
            "quant.nvfp4.e4m3_max is 448 but the NVTE_NVFP4_* variables ask for 256; unset",
        ),
        ("NVTE_NVFP4_4OVER6_ERR_MODE", "mse", "NVTE_NVFP4_4OVER6_ERR_MODE='mse': allowed are MAE, MSE"),
    ],
)
def test_variables_that_the_run_would_refuse(variable: str, value: str, said: str, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    assert f"[NVFP4-CONTRACT] {said}" in refusal()
    check_or_raise(load(ROOT / "recipes" / "quickstart.yaml"))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (both("bf16_first_layers=99"), "first=99 and last=0 bf16 layers do not fit in 2 decoder layers; lower"),
        (both("bf16_first_layers=2"), "no routed expert is left to quantise; lower the bf16 layers"),
        (
            both("ignore=[nothing.]"),
            "nvfp4 ignore: 'nothing.' matches no weight of the model; give a Hugging Face name",
        ),
        (
            both("ignore=[model.layers.0.mlp.experts.0.up_proj.weight]"),
            "half is missing: model.layers.0.mlp.experts.0.up",
        ),
        (
            ["model.create.expert_ffn_hidden_size=72"],
            "down_proj.weight has rows of 72 values, NVFP4 rounds blocks of 16; set model.create.expert_ffn_hidden_size to",
        ),
        (
            ["model.create.hidden_size=72"],
            "rows of 72 values, NVFP4 rounds blocks of 16; set model.create.hidden_size to",
        ),
        (
            ["model.create.expert_ffn_hidden_size=48", "train.parallel.tp=2", "train.parallel.etp=2"],
            "has rows of 48 values over 2 ranks (train.parallel.etp), NVFP4 rounds blocks of 16",
        ),
    ],
)
def test_options_that_the_model_cannot_follow(sets: list[str], said: str) -> None:
    assert said in refusal(*sets)


def test_options_that_the_model_follows_pass() -> None:
    check_or_raise(load(TINY, [*both("bf16_first_layers=1"), "model.create.expert_ffn_hidden_size=48"]))
    check_or_raise(load(TINY, both("ignore=[model.layers.0.]")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_char_tokenizer("0123456789=", tmp_path / "tokenizer")
    shape = ModelShape(expert_ffn_hidden_size=64)
    return create_checkpoint(
        tmp_path / "model", family="qwen3_moe", shape=shape, tokenizer_dir=tmp_path / "tokenizer", seed=0
    )


def trained_with(folder: Path, config: NVFP4QDQConfig) -> None:
    names = Scope().select(load_file(folder / "model.safetensors"))
    contract.write(folder, nvfp4_contract(config, names, source_digest="s", producer={}, weights="masters"))


def test_a_model_trained_with_rounding_starts_with_that_rounding_alone(model: Path) -> None:
    path = f"model.path={model}"
    check_or_raise(load(TINY, [path]))
    trained_with(model, NVFP4QDQConfig())
    assert "four_over_six.on: expected True, found False" in refusal(path)
    plain = ["quant={fake_qat: none}", "engine.nvfp4_experts=null", "quant.nvfp4=null", "quant.gates=[]"]
    said = refusal(path, *plain)
    assert "was trained with nvfp4 rounding, this run has none; give quant and engine.nvfp4_experts" in said
    with pytest.raises(ConfigError, match="this run has none"):
        check_start(load(TINY, [path, *plain]))
    trained_with(model, load(TINY).quant.nvfp4.resolve())
    check_or_raise(load(TINY, [path]))


def test_a_packed_model_or_teacher_is_refused_with_its_format(model: Path, tmp_path: Path) -> None:
    to_nvfp4.convert(model, tmp_path / "nvfp4", config=load(TINY).quant.nvfp4.resolve())
    bf16_to_fp8.convert(model, tmp_path / "fp8", scope="experts")
    for folder, kind, recipe in (("nvfp4", "modelopt NVFP4", TINY), ("fp8", "fp8", TINY)):
        said = refusal(f"model.path={tmp_path / folder}", recipe=recipe)
        assert f"{folder}: holds quantised weights (config.json says {kind}; " in said
        assert "\n" not in said
        assert said.endswith("give the bf16 (or fp16, fp32) model that it was made from")


def test_a_packed_model_without_words_about_it_is_recognised_by_its_tensors(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
    (model / "quantization_contract.json").write_text(json.dumps([]))
    assert f"holds quantised weights ({name} is F8_E4M3), which" in refusal(f"model.path={model}")


def test_the_plan_repeats_overrides_with_their_brackets() -> None:
    sets = both("ignore=[model.layers.0.]")
    console = Console(file=io.StringIO(), width=60)
    describe(load(TINY, sets), sets, console)
    assert "--set quant.nvfp4.ignore=[model.layers.0.] --set engine" in console.file.getvalue()
