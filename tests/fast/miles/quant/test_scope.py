"""One scope for converter, export and fake QAT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant import contract, qat
from miles.quant.convert import to_nvfp4
from miles.quant.export import export_nvfp4
from miles.quant.scope import (
    Ignore,
    Scope,
    check_pairs,
    decoder_layer,
    edge_layers_ignore,
    gate_up_partner,
    is_routed_expert_weight,
)

_Q = "model.layers.3.mlp."
SCOPE_TABLE: tuple[tuple[str, bool], ...] = (
    (f"{_Q}experts.0.gate_proj.weight", True),
    (f"{_Q}experts.127.up_proj.weight", True),
    (f"{_Q}experts.5.down_proj.weight", True),
    (f"{_Q}experts.5.w1.weight", True),
    (f"{_Q}experts.5.w2.weight", True),
    (f"{_Q}experts.5.w3.weight", True),
    (f"{_Q}experts.gate_up_proj", True),
    (f"{_Q}experts.down_proj", True),
    ("model.layers.5.mlp.experts.gate_up_proj.weight", True),
    ("model.layers.0.block_sparse_moe.experts.7.w1.weight", True),
    ("model.layers.0.block_sparse_moe.experts.7.w2.weight", True),
    ("model.language_model.layers.4.mlp.experts.gate_up_proj", True),
    ("mtp.layers.0.mlp.experts.3.gate_proj.weight", True),
    ("mtp.layers.0.mlp.experts.3.down_proj.weight", True),
    ("model.mtp.layers.0.mlp.experts.gate_up_proj", True),
    ("layers.10.ffn.experts.12.w1.weight", True),
    ("decoder.layers.0.mlp.experts.linear_fc1.weight0", True),
    ("decoder.layers.0.mlp.experts.linear_fc2.weight31", True),
    ("decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight", True),
    ("module.decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight", True),
    ("mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight3", True),
    (f"{_Q}shared_expert.gate_proj.weight", False),
    (f"{_Q}shared_expert.down_proj.weight", False),
    (f"{_Q}shared_experts.up_proj.weight", False),
    (f"{_Q}shared_experts.experts.0.up_proj.weight", False),
    (f"{_Q}experts.shared_experts.gate_proj.weight", False),
    (f"{_Q}experts.shared_experts.0.w1.weight", False),
    (f"{_Q}shared_expert_gate.weight", False),
    ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", False),
    ("mtp.layers.0.mlp.shared_expert.gate_proj.weight", False),
    (f"{_Q}experts.0.gate_proj.bias", False),
    (f"{_Q}experts.9.gate_proj.weight_scale", False),
    (f"{_Q}experts.9.gate_proj.weight_scale_inv", False),
    (f"{_Q}experts.9.gate_proj.weight_scale_2", False),
    (f"{_Q}experts.9.gate_proj.input_scale", False),
    (f"{_Q}experts.gate_up_proj_bias", False),
    (f"{_Q}experts.gate_up_proj_scales", False),
    ("decoder.layers.0.mlp.experts.linear_fc1._extra_state", False),
    ("decoder.layers.0.mlp.experts.linear_fc1.bias0", False),
    ("decoder.layers.0.mlp.experts.local_experts.2.linear_fc1._extra_state", False),
    (f"{_Q}gate.weight", False),
    (f"{_Q}gate.e_score_correction_bias", False),
    ("decoder.layers.0.mlp.router.weight", False),
    ("decoder.layers.0.mlp.router.expert_bias", False),
    (f"{_Q}gate_proj.weight", False),
    (f"{_Q}down_proj.weight", False),
    ("decoder.layers.0.mlp.linear_fc1.weight", False),
    ("model.layers.3.self_attn.q_proj.weight", False),
    ("model.layers.3.self_attn.o_proj.weight", False),
    ("decoder.layers.0.self_attention.linear_qkv.weight", False),
    ("model.layers.3.input_layernorm.weight", False),
    ("model.embed_tokens.weight", False),
    ("lm_head.weight", False),
    ("output_layer.weight", False),
)


@pytest.mark.parametrize(("name", "answer"), SCOPE_TABLE)
def test_scope_table(name: str, answer: bool) -> None:
    assert is_routed_expert_weight(name) is answer


def test_the_table_has_forty_names_and_every_spelling_of_shared() -> None:
    assert len(SCOPE_TABLE) >= 40
    joined = " ".join(name for name, _ in SCOPE_TABLE)
    for spelling in (
        "shared_expert.",
        "shared_experts.",
        "experts.shared_experts.",
        "shared_experts.experts.",
        "shared_expert_gate",
    ):
        assert spelling in joined


class Holder(nn.Module):
    """A module tree with one [16, 32] parameter for every name given."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            owner.register_parameter(leaf, nn.Parameter(torch.randn(16, 32)))


def paths(folder: Path) -> tuple[set[str], set[str], set[str]]:
    """Names that the converter, the live export and the QAT hook choose out of the table."""
    weights = [n for n, _ in SCOPE_TABLE]
    complete = [*weights, *(p for n in weights if (p := gate_up_partner(n)) and p not in weights)]
    folder.joinpath("source").mkdir()
    save_file({n: torch.randn(16, 32) for n in complete}, folder / "source" / "model.safetensors")
    to_nvfp4.convert(folder / "source", folder / "converted")
    stream = ((n, torch.randn(16, 32)) for n in complete)
    exported = export_nvfp4(stream, folder / "exported", NVFP4QDQConfig(), model_config={})
    hooked = qat.install(Holder(complete), NVFP4QDQConfig()).names
    return set(contract.read(folder / "converted").tensors), set(exported.tensors), set(hooked)


def test_scope_table_three_paths(tmp_path: Path) -> None:
    converter, exported, hooked = paths(tmp_path)
    answers = {n for n, a in SCOPE_TABLE if a}
    in_table = {n for n, _ in SCOPE_TABLE}
    assert converter & in_table == exported & in_table == hooked & in_table == answers


def test_ignore_matches_exact_prefix_and_pattern() -> None:
    ignore = Ignore(("model.layers.0.", "lm_head.weight", r"re:.*\.experts\.7\..*"))
    assert ignore.matches("model.layers.0.mlp.experts.1.up_proj.weight")
    assert not ignore.matches("model.layers.01.mlp.experts.1.up_proj.weight")
    assert ignore.matches("lm_head.weight")
    assert ignore.matches("model.layers.4.mlp.experts.7.up_proj.weight")
    assert "model.layers.0.mlp.experts.1.up_proj.weight" not in Scope(ignore)


def test_ignore_is_written_back_as_prefixes_never_as_their_leaves() -> None:
    ignore = Ignore(
        (
            "model.layers.0.",
            "model.layers.0.mlp.experts.",
            "model.layers.0.mlp.experts.1.up_proj.weight",
            "lm_head.weight",
        )
    )
    assert ignore.compact() == ("lm_head.weight", "model.layers.0.")


def test_bad_ignore_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        Ignore(("re:(",))
    with pytest.raises(ValueError, match="is empty"):
        Ignore(("",))


def test_first_and_last_bf16_layers_count_decoder_layers_only() -> None:
    names = [f"model.layers.{i}.mlp.experts.0.up_proj.weight" for i in range(48)]  # 47 is the MTP layer
    ignore = edge_layers_ignore([*names, "mtp.layers.0.mlp.gate.weight"], num_layers=47, first=1, last=2)
    assert ignore.entries == ("model.layers.0.", "model.layers.45.", "model.layers.46.")
    assert not ignore.matches(names[47])
    assert decoder_layer("model.layers.47.mlp.gate.weight", 47) is None
    assert decoder_layer("mtp.layers.0.mlp.gate.weight", 47) is None
    assert decoder_layer("model.layers.46.mlp.gate.weight", 47) == 46
    with pytest.raises(ValueError, match="do not fit in 3 decoder layers"):
        edge_layers_ignore(names, 3, 2, 2)


def test_edge_layers_follow_the_prefix_of_the_names() -> None:
    names = [f"model.language_model.layers.{i}.mlp.experts.gate_up_proj" for i in range(3)]
    assert edge_layers_ignore(names, 3, 1, 0).entries == ("model.language_model.layers.0.",)


def test_entries_that_match_nothing_are_named() -> None:
    names = ["model.layers.0.mlp.experts.1.up_proj.weight"]
    ignore = Ignore(("model.layers.0", "model.layers.0.", "re:.*up_proj", "re:.*up_proj.*"))
    assert ignore.unused(names) == ["model.layers.0", "re:.*up_proj"]


def test_missing_or_duplicated_gate_up_half_raises() -> None:
    gate, up = "m.mlp.experts.0.gate_proj.weight", "m.mlp.experts.0.up_proj.weight"
    check_pairs([gate, up, "m.mlp.experts.0.down_proj.weight"])
    with pytest.raises(ValueError, match=r"half is missing: m\.mlp\.experts\.0\.up_proj\.weight"):
        check_pairs([gate])
    with pytest.raises(ValueError, match="more than once"):
        check_pairs([gate, up, up])
