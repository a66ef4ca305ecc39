"""What config.json excludes is what its readers exclude: transformers itself, and the rules of vLLM, SGLang, ModelOpt."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear
from transformers.quantizers.quantizers_utils import should_convert_module

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.convert import bf16_to_fp8, to_nvfp4
from miles.quant.convert.planning import compact_excludes

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def by_transformers(module: str, excluded: list[str]) -> bool:
    return not should_convert_module(module, excluded)


def by_whole_names(module: str, excluded: list[str]) -> bool:
    """vLLM's and SGLang's fp8: whole names, fused projections by their parts, experts by what lies inside."""
    stem, _, last = module.rpartition(".")
    if last in FUSED:
        (answer,) = {f"{stem}.{part}" in excluded for part in FUSED[last]}
        return answer
    if last == "experts":
        return any(module in entry for entry in excluded if "experts" in entry)
    return module in excluded


def by_wildcards(module: str, excluded: list[str]) -> bool:
    """ModelOpt's list as vLLM and SGLang read it."""
    pattern = [entry.replace(".", r"\.").replace("*", ".*") for entry in excluded]
    return any(fnmatch(module, e) for e in excluded) or any(re.fullmatch(p, module) for p in pattern)


READERS = [by_transformers, by_whole_names, by_wildcards]


def moe_names(layers: int) -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        names += [f"{stem}.self_attn.{p}_proj.weight" for p in "qkvo"] + [f"{stem}.self_attn.q_proj.bias"]
        names += [f"{stem}.mlp.gate.weight", f"{stem}.mlp.shared_expert_gate.weight"]
        names += [f"{stem}.mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")]
        names += [f"{stem}.mlp.experts.{e}.{p}_proj.weight" for e in (0, 1, 10) for p in ("gate", "up", "down")]
    return names


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_experts_of_other_layers_stay_quantised_when_one_layer_is_kept(reader) -> None:
    names = moe_names(12)
    quantised = [n for n in names if ".experts." in n and not n.startswith("model.layers.1.")]
    excluded = compact_excludes((n for n in names if n not in quantised), quantised)
    assert reader("lm_head", excluded)
    for layer in range(12):
        stem = f"model.layers.{layer}"
        kept = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.shared_expert.down_proj"]
        assert all(reader(f"{stem}.{module}", excluded) for module in kept)
        assert reader(f"{stem}.mlp.experts", excluded) is (layer == 1)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_kept_projections_exclude_no_neighbour_and_a_bias_excludes_nothing(reader) -> None:
    names = moe_names(12)
    kept = {"lm_head.weight", *(f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv")}
    kept |= {n for n in names if n.endswith((".bias", "norm.weight", "tokens.weight", ".gate.weight"))}
    quantised = [n for n in names if n not in kept]
    excluded = compact_excludes(kept, quantised)
    for name in names:
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and ".experts." not in name:
            assert reader(module, excluded) is (name in kept), name
    assert reader("model.layers.1.mlp.experts", excluded) is False


def test_fused_projections_are_excluded_by_their_parts() -> None:
    names = moe_names(2)
    quantised = [n for n in names if ".experts." in n]
    excluded = compact_excludes((n for n in names if n not in quantised), quantised)
    assert by_whole_names("model.layers.1.self_attn.qkv_proj", excluded)
    assert by_whole_names("model.layers.1.mlp.shared_expert.gate_up_proj", excluded)


def test_packed_experts_that_are_kept_are_their_container_or_named() -> None:
    first, second = ("model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.gate_up_proj")
    assert compact_excludes([first, second], []) == ["model.layers.0.mlp.experts"]
    assert compact_excludes([first, first + "_bias"], [second]) == [first]


def test_transformers_builds_no_fp8_module_where_the_converter_kept_the_weight(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=64,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    (tmp_path / "bf16").mkdir()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "bf16" / "model.safetensors")
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    query = "model.layers.0.self_attn.q_proj"
    bf16_to_fp8.convert(tmp_path / "bf16", tmp_path / "fp8", ignore=[f"{query}.weight"])
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    excluded = written["modules_to_not_convert"]
    with torch.device("meta"):
        read = replace_with_fp8_linear(Qwen3ForCausalLM(config), excluded, FineGrainedFP8Config())
    built = {name for name, module in read.named_modules() if isinstance(module, FP8Linear)}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert built == linear - {"lm_head", query}


def test_engines_read_the_excluded_modules_of_nvfp4_from_ignore() -> None:
    written = to_nvfp4.nvfp4_quantization_config(NVFP4QDQConfig(), ["lm_head"])
    assert written["ignore"] == written["exclude_modules"] == ["lm_head"]
