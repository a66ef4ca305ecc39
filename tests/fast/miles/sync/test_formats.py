"""Quantised destinations: which arrays are sent, where they may be cut, and that engines get the codec's bits."""

from dataclasses import replace

import pytest
import torch
from sync_engines import status

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8, nvfp4
from miles.quant.packed import pair_amax
from miles.sync.config import SyncConfig
from miles.sync.entry import SourceSpec
from miles.sync.errors import PlanError, SyncOptionError
from miles.sync.formats import atomic_group, targets_of
from miles.sync.plan import build_plan
from miles.weight_wire.table import EngineTable, ParamEntry

FP8 = "float8_e4m3fn"
INDEXER = "model.layers.0.self_attn.indexer."


def bf16(*shape):
    return SourceSpec(shape, "bfloat16")


def quantised(name, shape, scale, *, dtype=FP8, scale_shape, scale_dtype):
    """The entries of a quantised matrix and of its scale."""
    return (
        ParamEntry(name, shape, dtype, scale=scale, scale_name=f"{name}_scale_inv"),
        ParamEntry(f"{name}_scale_inv", scale_shape, scale_dtype),
    )


def fp8_entries(name, shape):
    return quantised(
        name, shape, "block128_fp32", scale_shape=tuple(-(-n // 128) for n in shape), scale_dtype="float32"
    )


def mxfp8_entries(name, shape):
    return quantised(name, shape, "mx32_e8m0", scale_shape=(shape[0], shape[1] // 32), scale_dtype="uint8")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("engine_format", ["bf16", "fp8", "mxfp8"])
def test_dtype_table(engine_format, interleaved):
    """Indexer weights: the engine's own table decides, so a fused bf16 destination stays bf16 in a quantised engine."""
    make = {"bf16": lambda n, s: (ParamEntry(n, s, "bfloat16"),), "fp8": fp8_entries, "mxfp8": mxfp8_entries}
    quantise = make[engine_format]
    names = {part: f"{INDEXER}{part}.weight" for part in ("wk", "wq_b", "weights_proj", "k_norm")}
    shapes = {"wk": (128, 256), "wq_b": (256, 256), "weights_proj": (64, 256), "k_norm": (128,)}
    entries = [*quantise(names["wq_b"], shapes["wq_b"]), ParamEntry(names["k_norm"], (128,), "float32")]
    if interleaved:
        fused = (names["wk"], names["weights_proj"])
        entries.append(ParamEntry(f"{INDEXER}wk_weights_proj", (192, 256), "bfloat16", fused_from=fused, num_shards=2))
    else:
        entries += [*quantise(names["wk"], shapes["wk"]), ParamEntry(names["weights_proj"], (64, 256), "bfloat16")]
    weights = {names[part]: bf16(*shape) for part, shape in shapes.items()}
    plan = build_plan(weights, [EngineTable(entries=tuple(entries))], run_id="r")
    (sent,) = plan.layouts.values()
    formats = {}
    for entry in sent:
        formats.setdefault(entry.hf_name, {})[entry.part] = entry.dtype
    kind = {
        "bf16": {"values": "bfloat16"},
        "fp8": {"values": FP8, "scale": "float32"},
        "mxfp8": {"values": FP8, "scale": "uint8"},
    }[engine_format]
    assert formats[names["wq_b"]] == kind
    assert formats[names["wk"]] == ({"values": "bfloat16"} if interleaved else kind)
    assert formats[names["weights_proj"]] == {"values": "bfloat16"}
    assert formats[names["k_norm"]] == {"values": "float32"}
    for group in {entry.atomic_group for entry in sent}:
        members = [entry for entry in sent if entry.atomic_group == group]
        assert plan.group_sizes[members[0].layout_key, group] == len(members), "scales travel with their values"


CODECS = {
    "tensor": (FP8, (1,), "float32", lambda w: fp8_tensor.quantize(w)),
    "block128_fp32": (FP8, (2, 3), "float32", lambda w: fp8_block.quantize(w, scale="fp32")),
    "block128_e8m0": (FP8, (2, 3), "uint8", lambda w: fp8_block.quantize(w, scale="e8m0")),
    "mx32_e8m0": (FP8, (200, 10), "uint8", lambda w: mxfp8.quantize(w)),
    "mx32_e8m0 packed": ("uint8", (200, 10), "uint8", lambda w: mxfp4.quantize(w)),
}


@pytest.mark.parametrize("transport", ["tensor", "broadcast"])
@pytest.mark.parametrize("case", CODECS)
def test_engine_holds_the_codecs_bits(start_engine, pusher_for, case, transport):
    dtype, scale_shape, scale_dtype, quantize = CODECS[case]
    shape = (200, 160) if "packed" in case else (200, 320)
    entries = quantised("w", shape, case.split()[0], dtype=dtype, scale_shape=scale_shape, scale_dtype=scale_dtype)
    parameters = {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in entries}
    engine = start_engine(parameters, table=EngineTable(entries=entries))
    weight = torch.randn(200, 320, dtype=torch.bfloat16)
    pusher_for(engine, config=SyncConfig(transport=transport)).push([("w", weight)], 1)
    codes, scale = quantize(weight)
    assert torch.equal(parameters["w"].view(torch.uint8), codes)
    assert torch.equal(parameters["w_scale_inv"], scale)


def nvfp4_entries(name, rows, cols):
    stem = name.removesuffix("weight")
    return (
        ParamEntry(name, (rows, cols // 2), "uint8", scale="nvfp4", scale_name=f"{stem}weight_scale"),
        ParamEntry(f"{stem}weight_scale", (rows, cols // 16), FP8),
        ParamEntry(f"{stem}weight_scale_2", (1,), "float32"),
    )


def test_gate_and_up_travel_together_only_where_they_share_a_scale():
    gate, up = (f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
    apart = {name: ParamEntry(name, (32, 32), "uint8", scale="nvfp4") for name in (gate, up)}
    assert atomic_group(apart[gate], gate) == atomic_group(apart[up], up) == f"{gate}+{up}"
    down = gate.replace("gate", "down")
    assert atomic_group(ParamEntry(down, (32, 32), "uint8", scale="nvfp4"), down) == down
    assert atomic_group(ParamEntry(gate, (32, 64), "float32"), gate) == gate
    fused = ParamEntry("gate_up", (64, 32), "uint8", scale="nvfp4", fused_from=(gate, up), num_shards=2)
    assert atomic_group(fused, gate) == "gate_up"


def test_nvfp4_gate_and_up_are_one_atomic_group_with_a_shared_maximum(start_engine, pusher_for):
    gate, up = (f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
    entries = (*nvfp4_entries(gate, 32, 64), *nvfp4_entries(up, 32, 64), ParamEntry("norm", (8,), "float32"))
    table = EngineTable(entries=entries)
    parameters = {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in entries}
    engine = start_engine(parameters, table=table)
    weights = {gate: torch.randn(32, 64), "norm": torch.randn(8), up: 7 * torch.randn(32, 64)}
    config = NVFP4QDQConfig(use_4over6=True, e4m3_max=256)
    pusher = pusher_for(engine, nvfp4=config)
    report = pusher.push(weights.items(), 1)
    assert set(report.engines.values()) == {"serving"}
    amax = pair_amax(weights[gate], weights[up])
    for name in (gate, up):
        stored = nvfp4.quantize(weights[name], config, amax=amax)
        stem = name.removesuffix("weight")
        assert torch.equal(parameters[name], stored.weight)
        assert torch.equal(parameters[f"{stem}weight_scale"].view(torch.uint8), stored.weight_scale)
        assert torch.equal(parameters[f"{stem}weight_scale_2"], stored.weight_scale_2)
    assert torch.equal(
        parameters[f"{gate.removesuffix('weight')}weight_scale_2"],
        parameters[f"{up.removesuffix('weight')}weight_scale_2"],
    )
    (buckets,) = ({p[0] for p in body["bucket"]["pieces"]} for path, body in engine.seen if "bucket" in body)
    assert {gate, up} <= buckets


def test_fused_and_sharded_fp8_is_quantised_whole_and_then_cut(start_engine, pusher_for):
    weights = {"q": torch.randn(512, 128), "k": torch.randn(256, 128)}

    def rank(r):
        fused = ParamEntry(
            "qk", (384, 128), FP8, scale="block128_fp32", scale_name="qk_scale", fused_from=("q", "k"), num_shards=2,
            shard_dim=0,
        )  # fmt: skip
        table = EngineTable(
            entries=(fused, ParamEntry("qk_scale", (3, 1), "float32", num_shards=2)), tp=2, engine_rank=r
        )
        return start_engine(
            {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in table.entries}, table=table
        )

    ranks = [rank(0), rank(1)]
    pusher_for(*ranks).push(weights.items(), 1)
    (q, q_scale), (k, k_scale) = (fp8_block.quantize(weights[name]) for name in ("q", "k"))
    for r, engine in enumerate(ranks):
        codes = torch.cat([q.chunk(2)[r], k.chunk(2)[r]])
        assert torch.equal(engine.parameters["qk"].view(torch.uint8), codes)
        assert torch.equal(engine.parameters["qk_scale"], torch.cat([q_scale.chunk(2)[r], k_scale.chunk(2)[r]]))
        assert status(engine)["state"] == "serving"


def test_a_cut_through_a_block_is_refused():
    def plan(*entries, weights, **layout):
        return build_plan(weights, [EngineTable(entries=entries, **layout)], run_id="r")

    half = ParamEntry("w", (64, 128), FP8, scale="block128_fp32", scale_name="s", shard_dim=0)
    with pytest.raises(PlanError, match=r"tp 2 cuts \[128, 128\] through a block of block128_fp32"):
        plan(half, ParamEntry("s", (1, 1), "float32"), weights={"w": bf16(128, 128)}, tp=2)
    fused = ParamEntry("w", (192, 128), FP8, scale="block128_fp32", scale_name="s", fused_from=("a", "b"), num_shards=2)
    scale = ParamEntry("s", (2, 1), "float32", num_shards=2)
    with pytest.raises(PlanError, match="64 rows of piece 0 end inside a block"):
        plan(fused, scale, weights={"a": bf16(64, 128), "b": bf16(128, 128)})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (fp8_entries("w", (128, 128))[:1], r"needs its scale in 'w_scale_inv' with 1 pieces"),
        (quantised("w", (4, 40), "mx32_e8m0", scale_shape=(4, 1), scale_dtype="uint8"), "columns in multiples of 32"),
        (quantised("w", (4, 40), "block128_fp32", scale_shape=(1, 1), scale_dtype="uint8"), "w_scale_inv holds uint8"),
        (quantised("w", (4, 40), "block128_fp32", dtype="uint8", scale_shape=(1, 1), scale_dtype="float32"), "stored as float8"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_hold_its_format_is_refused(entries, message):
    with pytest.raises(PlanError, match=message):
        build_plan({"w": bf16(*entries[0].shape)}, [EngineTable(entries=entries)], run_id="r")


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_folders_refuse_quantised_engines_by_name(start_engine, pusher_for, transport):
    entries = fp8_entries("w", (128, 128))
    engine = start_engine(
        {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in entries},
        table=EngineTable(entries=entries),
    )
    with pytest.raises(
        SyncOptionError, match=rf"sync\.transport={transport} carries unquantised .* use sync\.transport=tensor"
    ):
        pusher_for(engine, config=SyncConfig(transport=transport)).push([("w", torch.zeros(128, 128))], 1)


def quantised_table(scale, *, dtype, shapes, tp=1, shard_dim=0, experts=0):
    """A gate/up destination with its scale arrays, as an engine reports them; `shapes`: of values and scale arrays."""
    fused = tuple(f"{part}{expert}" for expert in range(max(experts, 1)) for part in ("gate", "up"))
    entries = [
        ParamEntry("gate_up", shapes[0], dtype, scale=scale, scale_name="gate_up_scale", fused_from=fused,
                   num_shards=2, num_local_experts=experts, shard_dim=shard_dim)
    ]  # fmt: skip
    for name, shape in zip(("gate_up_scale", "gate_up_scale_2"), shapes[1:], strict=False):
        entries.append(ParamEntry(name, shape, "float32", num_shards=2, num_local_experts=experts))
    return EngineTable(entries=tuple(entries), tp=tp)


@pytest.mark.parametrize(
    ("scale", "dtype", "experts", "shard_dims"),
    [
        ("block128_fp32", FP8, 0, {"values": 0, "scale": 0}),
        ("tensor", FP8, 0, {"values": 0, "scale": None}),
        ("nvfp4", "uint8", 0, {"values": 0, "scale": 0, "scale_2": None}),
        ("nvfp4", "uint8", 3, {"values": 0, "scale": 0, "scale_2": None}),
    ],
)
def test_scale_arrays_are_fused_and_cut_like_their_weight(scale, dtype, experts, shard_dims):
    """A scale that belongs to a whole matrix is never cut."""
    lead = (experts,) if experts else ()
    table = quantised_table(scale, dtype=dtype, shapes=[(*lead, 256, 128), (*lead, 4, 1), (*lead, 2)], experts=experts)
    destination = table.entries[0]
    targets = targets_of(destination, table)
    assert {part: target.shard_dim for part, target in targets.items()} == shard_dims
    assert [target.name for target in targets.values()] == ["gate_up", "gate_up_scale", "gate_up_scale_2"][
        : len(targets)
    ]
    for target in targets.values():
        assert target.fused_from == destination.fused_from
        assert (target.num_shards, target.num_local_experts) == (2, experts)


def test_a_scale_reported_as_so_many_shards_is_stacked_like_its_experts():
    """Six pieces are six pieces; which expert and shard each is of, the weight's own entry says."""
    table = quantised_table("block128_fp32", dtype=FP8, shapes=[(3, 256, 128), (3, 4, 1)], experts=3)
    destination, scale = table.entries
    table = EngineTable(entries=(destination, replace(scale, num_shards=6, num_local_experts=0)))
    target = targets_of(destination, table)["scale"]
    assert (target.num_shards, target.num_local_experts) == (2, 3)


def test_the_scale_of_a_weight_that_is_not_fused_comes_from_the_weight():
    table = EngineTable(entries=fp8_entries("w", (128, 128)))
    assert targets_of(table.entries[0], table)["scale"].fused_from == ("w",)


def with_scale(change):
    table = quantised_table("block128_fp32", dtype=FP8, shapes=[(256, 128), (2, 1)])
    entries = list(table.entries)
    entries[1:] = change(entries[1])
    return EngineTable(entries=tuple(entries))


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: [],
        lambda scale: [replace(scale, num_shards=1)],
        lambda scale: [replace(scale, num_local_experts=2)],
        lambda scale: [replace(scale, recomputed=True)],
        lambda scale: [replace(scale, name="owner"), replace(scale, alias_of="owner")],
    ],
    ids=["missing", "one piece", "more pieces", "recomputed", "alias"],
)
def test_a_scale_that_cannot_be_filled_piece_by_piece_is_refused(change):
    table = with_scale(change)
    with pytest.raises(PlanError, match="needs its scale in 'gate_up_scale' with 2 pieces"):
        targets_of(table.entries[0], table)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_engine_gets_its_part_of_values_and_scales(start_engine, pusher_for, rank):
    """Gate and up of 512 rows each in blocks of 128: each rank holds two blocks of both."""
    torch.manual_seed(0)
    weights = {name: torch.randn(512, 256) for name in ("gate0", "up0")}
    table = quantised_table("block128_fp32", dtype=FP8, shapes=[(512, 256), (4, 2)], tp=2)
    table = replace(table, engine_rank=rank)
    parameters = {
        "gate_up": torch.zeros(512, 256, dtype=torch.float8_e4m3fn), "gate_up_scale": torch.zeros(4, 2)
    }  # fmt: skip
    engine = start_engine(parameters, table=table)
    pusher_for(engine, config=SyncConfig(transport="tensor", timeout_s=5.0)).push(weights.items(), 1)
    for part, name in enumerate(("gate0", "up0")):
        codes, scale = fp8_block.quantize(weights[name], scale="fp32", name=name)
        rows, blocks = slice(256 * part, 256 * part + 256), slice(2 * part, 2 * part + 2)
        assert torch.equal(
            parameters["gate_up"][rows].view(torch.uint8), codes[256 * rank : 256 * rank + 256].view(torch.uint8)
        )
        assert torch.equal(parameters["gate_up_scale"][blocks], scale[2 * rank : 2 * rank + 2])
