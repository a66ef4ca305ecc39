"""config.json and weights in every form that the pinned transformers reads and writes, for every family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.models import registry
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.models.errors import ModelError
from miles.models.family import read_hf_config
from miles.models.hf_files import HFCheckpoint
from miles.models.spellings import OTHER_NAMES, complete, rope_section, stated_dtype

SHAPES = {
    "plain": ModelShape(),
    "tied": ModelShape(tied=True, dtype="bfloat16"),
    "other numbers": ModelShape(heads=4, groups=4, head_dim=24, rope_theta=5e5, max_positions=128, num_experts=6),
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 128,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


def make(folder: Path, family: str, tokenizer_dir: Path, shape: ModelShape) -> Path:
    return create_checkpoint(folder, family=family, shape=shape, tokenizer_dir=tokenizer_dir, seed=0)


def resave(source: Path, target: Path, **options) -> Path:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(target, **options)
    return target


def same(first: Path, second: Path) -> None:
    """Both folders are one model to the trainer and to the engine."""
    configs = [read_hf_config(folder) for folder in (first, second)]
    families = [registry.resolve(config) for config in configs]
    assert families[0] is families[1]
    assert families[0].to_mcore(configs[0]) == families[0].to_mcore(configs[1])
    assert stated_dtype(configs[0]) == stated_dtype(configs[1])
    weights = [HFCheckpoint(folder) for folder in (first, second)]
    for name, shape, _ in families[0].shapes(configs[0]):
        for checkpoint in weights:
            checkpoint.check(name, shape)
        assert torch.equal(weights[0].read(name), weights[1].read(name)), name
    bound = families[0].weights.bind(families[0].to_mcore(configs[0]).map_shape)
    for checkpoint in weights:
        bound.check_hf_coverage(checkpoint.names(), where="here")
    engines = [engine_model(folder) for folder in (first, second)]
    assert engines[0].shape == engines[1].shape
    assert engines[0].parameters().keys() == engines[1].parameters().keys()
    assert all(torch.equal(value, engines[1].parameters()[name]) for name, value in engines[0].parameters().items())


def engine_model(folder: Path):
    from miles.rollout.engines.embedded.checkpoint import load_weights, read_config
    from miles.rollout.engines.embedded.models import build_model

    with torch.no_grad():
        model = build_model(read_config(folder), dtype=torch.float32, device=torch.device("cpu"), context=None)
        load_weights(folder, model.parameters(), model.aliases())
    return model


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("family", registry.families())
def test_what_transformers_saves_again_is_read_as_the_same_model(family, kind, tokenizer_dir, tmp_path):
    ours = make(tmp_path / "ours", family, tokenizer_dir, SHAPES[kind])
    same(ours, resave(ours, tmp_path / "theirs"))


def test_experts_that_transformers_leaves_packed_are_read_one_by_one(tokenizer_dir, tmp_path):
    ours = make(tmp_path / "ours", "qwen3_moe", tokenizer_dir, ModelShape(num_experts=5))
    packed = resave(ours, tmp_path / "packed", save_original_format=False)
    stored = load_file(packed / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 64, 64)
    same(ours, packed)
    one, other = HFCheckpoint(ours), HFCheckpoint(packed)
    for half in ("gate", "up", "down"):
        name = f"model.layers.1.mlp.experts.3.{half}_proj.weight"
        for axis in (0, 1):
            assert torch.equal(one.read(name, axis, 7, 19), other.read(name, axis, 7, 19)), (name, axis)
    assert one.nbytes() == other.nbytes()
    stored["model.layers.1.mlp.experts.down_proj"][4, 2, 1] = torch.inf
    save_file(stored, packed / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.experts\.4\.down_proj\.weight: 1 of \d+ values are not finite"
    ):
        HFCheckpoint(packed).check_finite()


def test_experts_packed_and_alone_in_one_folder_are_refused(tokenizer_dir, tmp_path):
    ours = make(tmp_path / "ours", "qwen3_moe", tokenizer_dir, ModelShape())
    tensors = load_file(ours / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(8, 64, 32)
    save_file(tensors, ours / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.0\.down_proj\.weight is also in"):
        HFCheckpoint(ours)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("family", registry.families())
def test_what_we_export_transformers_loads_and_saves_and_we_read(family, kind, tokenizer_dir, tmp_path):
    """Through a training checkpoint, whose export repeats the config that was read."""
    from transformers import AutoModelForCausalLM

    from miles.train.convert import checkpoint_to_hf, hf_to_checkpoint

    theirs = resave(make(tmp_path / "ours", family, tokenizer_dir, SHAPES[kind]), tmp_path / "theirs")
    hf_to_checkpoint(theirs, tmp_path / "run")
    exported = checkpoint_to_hf(tmp_path / "run", tmp_path / "exported")
    same(theirs, exported)
    again = resave(exported, tmp_path / "again")
    same(exported, again)
    ids = torch.tensor([[2, 5, 7, 3]])
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (theirs, exported, again)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", registry.families())
def test_rotary_settings_survive_transformers_in_both_spellings(family, rope, tokenizer_dir, tmp_path):
    ours = make(tmp_path / "ours", family, tokenizer_dir, ModelShape())
    config = json.loads((ours / "config.json").read_text())
    section = dict(ROPES[rope])
    old = {key: value for key, value in config.items() if key != "rope_parameters"} | {"rope_theta": 1e4}
    old["rope_scaling"] = {
        ("type" if key == "rope_type" else key): v for key, v in section.items() if key != "rope_theta"
    }
    specs = []
    for values in (config | {"rope_parameters": section}, old):
        (ours / "config.json").write_text(json.dumps(values))
        specs.append(registry.by_name(family).to_mcore(values).rope)
        target = resave(ours, tmp_path / f"theirs{len(specs)}")
        specs.append(registry.by_name(family).to_mcore(read_hf_config(target)).rope)
    assert len(set(specs)) == 1
    assert specs[0].kind == rope


def configuration(family: str):
    from transformers import AutoConfig

    model_type = registry.by_name(family).hf_config(ModelShape(), 16, {})["model_type"]
    return type(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("family", registry.families())
def test_every_name_that_the_configuration_class_maps_is_known_here(family):
    mapped = configuration(family).attribute_map
    assert {name: (other,) for name, other in mapped.items()}.items() <= OTHER_NAMES.items()


@pytest.mark.parametrize("family", registry.families())
def test_a_configuration_without_a_model_reads_as_transformers_means_it(family, tmp_path):
    """The class's own defaults, written by itself: what it leaves out it derives."""
    theirs = configuration(family)(architectures=list(registry.by_name(family).architectures))
    theirs.save_pretrained(tmp_path)
    model = registry.by_name(family).to_mcore(read_hf_config(tmp_path))
    head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (model.heads, model.groups, model.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    assert model.rope.theta == theirs.rope_parameters["rope_theta"]
    assert model.num_experts == getattr(theirs, "num_experts", 0)


def test_no_key_and_value_heads_means_one_for_each_head():
    assert complete({"num_attention_heads": 8, "num_key_value_heads": None})["num_key_value_heads"] == 8
    assert "num_key_value_heads" not in complete({"num_attention_heads": 8})
    assert "head_dim" not in complete({"model_type": "qwen3", "num_attention_heads": 8, "hidden_size": 64})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 8, "num_local_experts": 4}, "num_experts is 8 but num_local_experts is 4"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype is 'float32' but torch_dtype is 'bfloat16'"),
        ({"rope_theta": 1e6}, "rope_parameters.rope_theta is 10000.0 but rope_theta is 1000000.0"),
        ({"rope_scaling": {"rope_theta": 1e6}}, "rope_parameters.rope_theta is 10000.0 but rope_scaling.rope_theta is"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type is 'default' but rope_scaling.type"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_parameters.rope_type is 'linear' but rope_parameters.type is 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25},
            "rope_parameters.partial_rotary_factor is 0.5 but partial_rotary_factor is 0.25",
        ),
        (
            {
                "rope_parameters": ROPES["yarn"],
                "original_max_position_embeddings": 64,
            },
            "original_max_position_embeddings is 128 but original_max_position_embeddings is 64",
        ),
        ({"rope_parameters": {**ROPES["yarn"], "truncate": False}}, "truncate false is not computed here"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 2]}}, "rotary setting 'mrope_section'"),
        ({"rope_parameters": {"full_attention": ROPES["yarn"]}}, "rotary setting 'full_attention'"),
        ({"rope_parameters": {**ROPES["yarn"], "factor": "2"}}, "factor must be a number, got '2'"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta must be a number, got True"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got list"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"per_layer_config": {"0": {"intermediate_size": 16}}}, "per_layer_config is"),
        ({"dtype": "int8"}, "dtype is 'int8'; supported: float32, bfloat16, float16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", registry.families())
def test_contradictions_and_unknown_forms_are_refused_with_both_values(family, change, said, tokenizer_dir, tmp_path):
    from miles.rollout.engines.embedded.models import build_model
    from miles.rollout.errors import EngineModelError

    values = registry.by_name(family).hf_config(ModelShape(), 16, {})
    for key in change:
        values.pop(key, None)
    values |= change
    with pytest.raises(ModelError, match=re.escape(said)):
        registry.by_name(family).to_mcore(values)
    if "dtype" in change and "torch_dtype" not in change:
        return  # an engine computes in engine.dtype
    with pytest.raises((EngineModelError, ModelError), match=re.escape(said)):
        build_model(values, dtype=torch.float32, device=torch.device("cpu"), context=None)


def test_equal_statements_are_no_contradiction():
    values = {
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "type": "default", "rope_theta": 1e4},
        "rope_scaling": None,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert rope_section(values) == {"rope_type": "default", "rope_theta": 1e4}
    assert stated_dtype(values) == "bfloat16"
    assert stated_dtype({"torch_dtype": "float16"}) == "float16"
    assert stated_dtype({}) == "float32"
