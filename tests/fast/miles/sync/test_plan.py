import itertools

import pytest

from miles.sync.entry import SourceSpec
from miles.sync.errors import PlanError
from miles.sync.plan import build_plan, covered_modules, selector_for
from miles.weight_wire.table import EngineTable, ParamEntry


def f32(*shape):
    return SourceSpec(shape, "float32")


def table(*entries, **layout):
    return EngineTable(entries=entries, **layout)


QKV = ParamEntry(
    "model.layers.0.qkv", (12, 8), "float32", fused_from=("q", "k", "v"), num_shards=3, shard_dim=0
)  # fmt: skip
SOURCES = {"q": f32(8, 8), "k": f32(2, 8), "v": f32(2, 8)}


def test_plan_is_complete_and_unique():
    norm = ParamEntry("model.layers.1.norm", (8,), "bfloat16")
    plan = build_plan({"model.layers.1.norm": f32(8), **SOURCES}, [table(norm, QKV)], run_id="r")
    (entries,) = plan.layouts.values()
    assert [(e.hf_name, e.dest, e.slot) for e in entries] == [
        ("q", QKV.name, ((0, 8),)),
        ("k", QKV.name, ((8, 10),)),
        ("v", QKV.name, ((10, 12),)),
        ("model.layers.1.norm", "model.layers.1.norm", None),
    ]
    assert sum(e.nbytes for e in entries) == 12 * 8 * 4 + 8 * 2
    assert plan.by_source.keys() == {"q", "k", "v", "model.layers.1.norm"}
    assert plan.digest == build_plan({**SOURCES, "model.layers.1.norm": f32(8)}, [table(norm, QKV)], run_id="r").digest
    assert plan.digest != build_plan({**SOURCES, "model.layers.1.norm": f32(8)}, [table(norm, QKV)], run_id="s").digest


def test_all_unknown_names_are_listed():
    with pytest.raises(PlanError, match=r"stray\.a has no destination[\s\S]*stray\.b has no destination"):
        build_plan({**SOURCES, "stray.b": f32(1), "stray.a": f32(1)}, [table(QKV)], run_id="r")


def test_a_missing_piece_of_a_fused_destination_is_fatal():
    with pytest.raises(PlanError, match=r"qkv waits for pieces nobody sends: k"):
        build_plan({"q": f32(8, 8), "v": f32(2, 8)}, [table(QKV)], run_id="r")


def test_an_unfilled_destination_of_a_covered_module_is_fatal_unless_alias_or_recomputed():
    head = ParamEntry("head", (8, 8), "float32", alias_of="embed")
    rope = ParamEntry("rope", (8,), "float32", recomputed=True)
    embed = ParamEntry("embed", (8, 8), "float32")
    build_plan({"embed": f32(8, 8)}, [table(embed, head, rope)], run_id="r")
    with pytest.raises(PlanError, match=r"lost \(module target\) receives nothing"):
        build_plan({"embed": f32(8, 8)}, [table(embed, ParamEntry("lost", (1,), "float32"))], run_id="r")


def test_a_name_with_two_destinations_is_fatal():
    second = ParamEntry("copy", (8, 8), "float32", fused_from=("q",))
    with pytest.raises(PlanError, match=r"q has two destinations: model\.layers\.0\.qkv and copy"):
        build_plan(SOURCES, [table(QKV, second)], run_id="r")


def test_offering_an_alias_or_a_recomputed_parameter_is_fatal():
    embed, head = ParamEntry("embed", (4, 4), "float32"), ParamEntry("head", (4, 4), "float32", alias_of="embed")
    with pytest.raises(PlanError, match="head shares its storage with embed"):
        build_plan({"embed": f32(4, 4), "head": f32(4, 4)}, [table(embed, head)], run_id="r")
    rope = ParamEntry("rope", (4,), "float32", recomputed=True)
    with pytest.raises(PlanError, match="rope is recomputed by the engine"):
        build_plan({"embed": f32(4, 4), "rope": f32(4)}, [table(embed, rope)], run_id="r")


@pytest.mark.parametrize(
    "weights",
    [{"q": f32(9, 8), "k": f32(2, 8), "v": f32(2, 8)}, {"q": f32(7, 8), "k": f32(2, 8), "v": f32(2, 8)}, {"q": f32(8, 9), "k": f32(2, 8), "v": f32(2, 8)}],
)  # fmt: skip
def test_pieces_that_do_not_fill_their_destination_exactly_are_fatal(weights):
    with pytest.raises(PlanError, match="does not fit"):
        build_plan(weights, [table(QKV)], run_id="r")


def test_packed_experts_get_one_slot_per_expert_and_shard():
    names = tuple(f"{part}.{expert}" for expert in range(2) for part in ("gate", "up"))
    packed = ParamEntry("experts", (2, 6, 4), "float32", fused_from=names, num_shards=2, num_local_experts=2)
    plan = build_plan({name: f32(3, 4) for name in names}, [table(packed)], run_id="r")
    (entries,) = plan.layouts.values()
    slots = {e.hf_name: e.slot for e in entries}
    assert slots == {
        "gate.0": ((0, 1), (0, 3)),
        "up.0": ((0, 1), (3, 6)),
        "gate.1": ((1, 2), (0, 3)),
        "up.1": ((1, 2), (3, 6)),
    }


def test_tensor_parallel_ranks_get_their_slices_and_tp_that_does_not_divide_is_fatal():
    def rank(r):
        entry = ParamEntry(QKV.name, (6, 8), "float32", fused_from=("q", "k", "v"), num_shards=3, shard_dim=0)
        return table(entry, tp=2, engine_rank=r)

    plan = build_plan(SOURCES, [table(QKV), rank(0), rank(1)], run_id="r")
    assert len(plan.layouts) == 3
    second = next(entries for key, entries in plan.layouts.items() if key.startswith("tp2r1"))
    assert [(e.hf_name, e.slice, e.slot) for e in second] == [
        ("q", ((4, 8),), ((0, 4),)),
        ("k", ((1, 2),), ((4, 5),)),
        ("v", ((1, 2),), ((5, 6),)),
    ]
    odd = ParamEntry("w", (1, 8), "float32", shard_dim=0)
    with pytest.raises(PlanError, match="dimension 0 cannot be split over tp 2"):
        build_plan({"w": f32(3, 8)}, [table(odd, tp=2)], run_id="r")


def test_alias_does_not_cover():
    embed = ParamEntry("embed", (4, 4), "float32")
    draft_embed = ParamEntry("draft.embed", (4, 4), "float32", module="draft", alias_of="embed")
    draft_layer = ParamEntry("draft.layer", (4,), "float32", module="draft")
    engine = table(embed, draft_embed, draft_layer)
    plan = build_plan({"embed": f32(4, 4)}, [engine], run_id="r")
    (entries,) = plan.layouts.values()
    assert covered_modules(entries, engine) == {"target"}
    assert plan.selectors[engine.layout_key] == ("target",)


@pytest.mark.parametrize(("speculative", "trainer_mtp", "draft_only"), list(itertools.product([False, True], repeat=3)))
def test_selector_eight_combinations(speculative, trainer_mtp, draft_only):
    """Engine with a draft or not x trainer that offers draft weights or not x only the draft or everything."""
    entries = [ParamEntry("w", (4,), "float32")]
    if speculative:
        entries.append(ParamEntry("mtp.w", (4,), "float32", module="draft"))
    engine = table(*entries)
    weights = ({} if draft_only else {"w": f32(4)}) | ({"mtp.w": f32(4)} if trainer_mtp else {})
    if not weights or (trainer_mtp and not speculative):
        with pytest.raises(PlanError, match=r"has no destination|at least one"):
            build_plan(weights, [engine], run_id="r")
        return
    selector = build_plan(weights, [engine], run_id="r").selectors[engine.layout_key]
    sent = {name for name, offered in (("target", not draft_only), ("draft", trainer_mtp)) if offered}
    owned = {"target", "draft"} if speculative else {"target"}
    assert selector == ("all" if sent == owned else tuple(sorted(sent)))
    assert selector == selector_for(frozenset(sent), engine)


def test_engine_table_survives_the_wire_and_a_changed_table_is_refused():
    engine = table(QKV, ParamEntry("x", (3,), "bfloat16", module="draft"), tp=2, engine_rank=1)
    wire = engine.to_wire()
    assert EngineTable.from_wire(wire) == engine
    wire["entries"][0]["dtype"] = "bfloat16"
    with pytest.raises(Exception, match="digest"):
        EngineTable.from_wire(wire)
