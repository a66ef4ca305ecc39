"""The weight map without megatron-core: bit-equal round trips at every cut, coverage both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.models import registry
from miles.models.errors import WeightMapError
from miles.models.weightmap import MapShape, global_name


def bound(**changes):
    values = {"num_layers": 2, "heads": 8, "groups": 4, "head_dim": 4, "vocab_size": 13, "tied": False}
    family = "qwen3_moe" if changes.get("num_experts") else "qwen3"
    return registry.by_name(family).weights.bind(MapShape(**(values | changes)))


def hf_tensors(weight_map, hidden=6, width=8):
    """Random tensors for every name the map expects."""
    shape = weight_map.shape
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "q_proj": (shape.heads * shape.head_dim, hidden),
        "k_proj": (shape.groups * shape.head_dim, hidden),
        "v_proj": (shape.groups * shape.head_dim, hidden),
        "o_proj": (hidden, shape.heads * shape.head_dim),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        "embed_tokens": (shape.vocab_size, hidden),
        "lm_head": (shape.vocab_size, hidden),
    }
    return {
        name: torch.randn(sizes.get(name.split(".")[-2], (hidden,)), generator=generator)
        for name in weight_map.expected_hf
    }


def local_shape(entry, tensors, parallel):
    """Shape of the local parameter, from cutting by hand."""
    rule = entry.rule
    parts = []
    for name, axis in zip(entry.hf, rule.axes, strict=True):
        size = list(tensors[name].shape)
        if axis is not None:
            size[axis] = -(-size[axis] // parallel)
        parts.append(size)
    if len(parts) == 1:
        return tuple(parts[0])
    return (sum(part[0] for part in parts), *parts[0][1:])


def read_from(tensors):
    def read(name, axis, start, stop):
        return tensors[name] if axis is None else tensors[name].narrow(axis, start, stop - start)

    return read


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_round_trip_is_bit_equal_for_every_tensor_and_cut(parallel, tied):
    weight_map = bound(tied=tied)
    tensors = hf_tensors(weight_map)
    back = {}
    for entry in weight_map.entries.values():
        shape = local_shape(entry, tensors, parallel)
        assert entry.hf_shapes(shape, parallel) == [tuple(tensors[name].shape) for name in entry.hf]
        locals_ = [
            entry.to_local(read_from(tensors), local=shape, rank=rank, parallel=parallel) for rank in range(parallel)
        ]
        assert all(part.shape == shape for part in locals_)
        back |= dict(entry.to_hf(locals_))
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_grouped_query_rows_survive_any_shape(groups, ratio, head_dim, hidden):
    weight_map = bound(heads=groups * ratio, groups=groups, head_dim=head_dim)
    entry = weight_map.entry("decoder.layers.1.self_attention.linear_qkv.weight")
    rows = (groups * ratio, groups, groups)
    tensors = {name: torch.randn(n * head_dim, hidden) for name, n in zip(entry.hf, rows, strict=True)}
    for parallel in {1, groups}:
        shape = ((groups * ratio + 2 * groups) * head_dim // parallel, hidden)
        parts = [entry.to_local(read_from(tensors), local=shape, rank=r, parallel=parallel) for r in range(parallel)]
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in entry.to_hf(parts))


def test_query_rows_stand_beside_their_group():
    """Two query heads a group: rows are q0 q1 k0 v0, q2 q3 k1 v1."""
    weight_map = bound(heads=4, groups=2, head_dim=1)
    entry = weight_map.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (torch.tensor(rows, dtype=torch.float32)[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    tensors = dict(zip(entry.hf, (q, k, v), strict=True))
    whole = entry.to_local(read_from(tensors), local=(8, 1), rank=0, parallel=1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_unmapped_name_lists_all():
    weight_map = bound()
    names = [*weight_map.expected_hf, "model.layers.0.extra.weight", "model.vision.weight"]
    with pytest.raises(WeightMapError, match=r"model\.layers\.0\.extra\.weight, model\.vision\.weight"):
        weight_map.check_hf_coverage(names, where="DIR")


def test_missing_names_are_all_listed():
    weight_map = bound()
    names = set(weight_map.expected_hf) - {"model.norm.weight", "lm_head.weight"}
    with pytest.raises(WeightMapError, match=r"DIR: tensors that are missing: lm_head\.weight, model\.norm\.weight"):
        weight_map.check_hf_coverage(names, where="DIR")


def test_unmapped_core_parameter_lists_all():
    with pytest.raises(WeightMapError, match=r"a\.bias, b\.weight"):
        bound().check_mcore_coverage(["b.weight", "a.bias", "decoder.final_layernorm.weight"])


def test_tied_head_may_stand_on_disk_but_is_not_expected():
    weight_map = bound(tied=True)
    assert "lm_head.weight" not in weight_map.expected_hf
    weight_map.check_hf_coverage([*weight_map.expected_hf, "lm_head.weight"], where="DIR")
    untied = bound()
    with pytest.raises(WeightMapError, match="does not know: lm_head"):
        untied.check_hf_coverage([*untied.expected_hf, "lm_head.weight2"], where="DIR")


def test_local_names_become_global():
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    expected = "decoder.layers.5.mlp.experts.local_experts.6.linear_fc1.weight"
    assert global_name(name, layer_offset=4, expert_offset=6) == expected
    assert global_name("embedding.word_embeddings.weight", layer_offset=4, expert_offset=6) == (
        "embedding.word_embeddings.weight"
    )


def test_fused_projections_form_atomic_groups():
    weight_map = bound()
    keys = {weight_map.atomic_group(f"model.layers.3.self_attn.{n}_proj.weight") for n in "qkv"}
    assert keys == {"model.layers.3.self_attn.qkv"}
    assert weight_map.atomic_group("model.norm.weight") is None
