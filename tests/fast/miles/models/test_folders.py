"""Model folders: creation, and every way in which one can be wrong."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from miles.models import registry
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.models.errors import ModelError, UnsupportedModelError
from miles.models.family import read_hf_config
from miles.models.hf_files import FolderWriter, HFCheckpoint, write_shards
from miles.models.safetensors_header import read_header


@pytest.mark.parametrize("family", registry.families())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_created_folder_loads_in_transformers(family, dtype, tokenizer_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = create_checkpoint(
        tmp_path / "m", family=family, shape=ModelShape(dtype=dtype), tokenizer_dir=tokenizer_dir, seed=0
    )
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)
    assert model.config.eos_token_id == 1
    assert 50_000 < sum(p.numel() for p in model.parameters()) < 2_000_000


def test_creation_is_a_function_of_the_seed(tokenizer_dir, tmp_path):
    folders = [
        create_checkpoint(tmp_path / name, tokenizer_dir=tokenizer_dir, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    data = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert data[0] == data[1] != data[2]


def test_creation_needs_no_torch():
    code = "import sys, miles.models.create; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_family_is_resolved_by_type_and_architecture(model_dir):
    assert registry.resolve(read_hf_config(model_dir)).name == "qwen3"
    with pytest.raises(UnsupportedModelError, match=r"model_type 'gpt2' has no family; supported: qwen3, qwen3_moe"):
        registry.resolve({"model_type": "gpt2"})
    with pytest.raises(UnsupportedModelError, match="Qwen3ForSequenceClassification"):
        registry.resolve({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", None, "rms_norm_eps is missing; it must come from the checkpoint"),
        ("num_hidden_layers", "2", "num_hidden_layers must be an integer, got '2'"),
        ("tie_word_embeddings", 1, "tie_word_embeddings must be true or false, got 1"),
        ("attention_bias", True, "attention_bias is True"),
        ("use_sliding_window", True, "sliding-window layers are not built"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    ],
)
def test_config_values_are_checked(key, value, message, model_dir):
    config = read_hf_config(model_dir)
    if value is None:
        del config[key]
    else:
        config[key] = value
    with pytest.raises(ModelError, match=message):
        registry.by_name("qwen3").to_mcore(config)


def test_missing_folder_and_broken_config_are_named(tmp_path):
    with pytest.raises(ModelError, match="model folder does not exist"):
        read_hf_config(tmp_path / "none")
    with pytest.raises(ModelError, match=r"config\.json: file is missing"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("keep", [4, 60, -10])
def test_truncated_safetensors_is_named_with_sizes(keep, model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated safetensors file"):
        HFCheckpoint(model_dir)


def test_garbage_is_not_a_safetensors_file(model_dir):
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope" * 9)
    with pytest.raises(ModelError, match="not a safetensors file"):
        HFCheckpoint(model_dir)


def test_wrong_shape_and_dtype_name_file_tensor_expected_and_got(model_dir):
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)
    save_file(tensors, path)
    checkpoint = HFCheckpoint(model_dir)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor model\.norm\.weight: expected shape \[16\], got \[3\]"
    ):
        checkpoint.check("model.norm.weight", (16,))
    with pytest.raises(ModelError, match=r"lm_head\.weight: expected a floating dtype .*, got I32"):
        checkpoint.check("lm_head.weight", (15, 16))


def test_missing_shard_and_lying_index_are_named(model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    write_shards(model_dir, tensors.items(), shard_bytes=8000)
    shards = sorted(model_dir.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert set(HFCheckpoint(model_dir).names()) == set(tensors)
    index_path = model_dir / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    index_path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"not in the shard that the index names: model\.norm\.weight"):
        HFCheckpoint(model_dir)
    shards[0].unlink()
    with pytest.raises(ModelError, match=rf"missing shards named by .*: {shards[0].name}"):
        HFCheckpoint(model_dir)


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/model.safetensors", "..", "sub/model.safetensors", "config.json", "a\0b", 5],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(name, model_dir):
    index_path = model_dir / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map names .*, which is not the plain name") as error:
        HFCheckpoint(model_dir)
    assert ascii(name) in str(error.value)


def test_slices_are_read_along_both_axes(model_dir):
    checkpoint = HFCheckpoint(model_dir)
    whole = checkpoint.read("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(checkpoint.read("model.layers.0.mlp.down_proj.weight", 0, 3, 7), whole[3:7])
    assert torch.equal(checkpoint.read("model.layers.0.mlp.down_proj.weight", 1, 5, 9), whole[:, 5:9])


def test_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"

    def fail():
        with FolderWriter(target) as folder:
            (folder / "x").write_text("1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
    for text in ("old", "new"):
        with FolderWriter(target) as folder:
            (folder / "x").write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "x").read_text() == "new"


_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "I8", 3, None]),
        "shape": st.lists(st.integers(-1, 4), max_size=2) | st.none(),
        "data_offsets": st.lists(st.integers(-8, 64) | st.none(), max_size=3),
    },
)


@given(
    st.binary(max_size=40) | st.dictionaries(st.text(max_size=4), _ENTRY | st.none()).map(json.dumps).map(str.encode)
)
def test_any_safetensors_header_is_read_or_refused_with_its_file(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    said = "any.safetensors"
    try:
        entries = read_header(path).tensors
    except ModelError as error:
        said, entries = str(error), {}
    assert "any.safetensors" in said
    assert all(0 <= entry.begin <= entry.end <= 32 for entry in entries.values())
