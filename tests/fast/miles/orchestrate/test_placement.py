"""Where ranks and engines go, over many clusters and recipes; and the numbers in refusals."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.orchestrate.errors import PlacementError
from miles.orchestrate.placement import ClusterFacts, NodeFacts, Placement, place
from miles.recipe.schema import Recipe


def recipe(*, world: dict[str, int] | None = None, engines: int = 1, **sections: Any) -> Recipe:
    train = {"parallel": world or {}, "device": sections.pop("device", "cuda")}
    engine = {"count": engines, "device": sections.pop("engine_device", train["device"]), **sections.pop("engine", {})}
    text = json.dumps({"name": "r", "train": train, "engine": engine, "placement": sections})
    return Recipe.model_validate_json(text)


def cluster(*nodes: tuple[int, int], driver: str = "n0") -> ClusterFacts:
    """Nodes as (cpus, gpus); node i is `n<i>` at 10.0.0.<i + 1>."""
    return ClusterFacts(
        tuple(NodeFacts(f"n{i}", f"10.0.0.{i + 1}", cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)), driver
    )


clusters = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=4).map(lambda n: cluster(*n))
meshes = st.fixed_dictionaries({"tp": st.sampled_from([1, 2, 4]), "pp": st.integers(1, 2), "dp": st.integers(1, 3)})
asked = {"engines": st.integers(1, 4), "mode": st.sampled_from(["disaggregated", "colocated"])}
kinds = st.sampled_from([("cuda", "cuda"), ("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda")])


def fits(recipe: Recipe, facts: ClusterFacts) -> bool:
    """By counting alone; for both on one kind of device, or engines on CPUs."""
    tp, world, engines = recipe.train.parallel.tp, recipe.train.parallel.world_size, recipe.engine.count
    on_gpus = recipe.train.device == "cuda"
    rooms = [min(n.cpus, n.gpus) if on_gpus else n.cpus for n in facts.nodes]
    if sum(room // tp for room in rooms) < world // tp:
        return False
    if recipe.engine.device == "cuda":
        return sum(rooms) >= world + engines
    return sum(n.cpus for n in facts.nodes) >= world + engines


def check(placement: Placement, recipe: Recipe, facts: ClusterFacts) -> None:
    trainers, engines = placement.trainer_devices, placement.engine_devices
    world, tp = recipe.train.parallel.world_size, recipe.train.parallel.tp
    assert (len(trainers), len(engines)) == (world, recipe.engine.count), "every rank and engine has a place"
    for start in range(0, world, tp):
        assert len({device.node for device in trainers[start : start + tp]}) == 1, "a tp group is on one node"
    assert len(set(trainers)) == world
    assert len(set(engines)) == len(engines)
    if recipe.placement.mode == "colocated":
        assert engines == trainers[: len(engines)], "each engine shares the device of one rank"
    else:
        assert not set(trainers) & set(engines), "no device twice"
    used = {device.bundle: device for device in (*trainers, *engines)}
    assert sorted(used) == list(range(len(placement.bundles))), "one bundle a device"
    for number, device in used.items():
        bundle, holders = placement.bundles[number], (trainers + engines).count(device)
        assert bundle.node == device.node
        assert bundle.cpus == holders, "a CPU for each process"
        assert bundle.gpus == (device.kind == "cuda")
        assert placement.gpu_share(device) * holders == bundle.gpus
    for node in facts.nodes:
        mine = [bundle for bundle in placement.bundles if bundle.node == node.id]
        assert sum(b.cpus for b in mine) <= node.cpus
        assert sum(b.gpus for b in mine) <= node.gpus
        for kind in ("cpu", "cuda"):
            numbers = sorted({d.index for d in used.values() if (d.node, d.kind) == (node.id, kind)})
            assert numbers == list(range(len(numbers))), "devices of a node are counted from 0"


@given(clusters, meshes, kinds, st.fixed_dictionaries(asked))
def test_every_placement_keeps_the_rules_and_nothing_but_a_refusal_stands_for_one(facts, mesh, kind, wish) -> None:
    wanted = recipe(world=mesh, device=kind[0], engine_device=kind[1], **wish)
    try:
        placement = place(wanted, facts)
    except PlacementError:
        return
    check(placement, wanted, facts)


@given(clusters, meshes, st.sampled_from([("cuda", "cuda"), ("cpu", "cpu"), ("cuda", "cpu")]), st.integers(1, 4))
def test_disaggregated_is_refused_exactly_when_it_does_not_fit(facts, mesh, kind, engines) -> None:
    wanted = recipe(world=mesh, device=kind[0], engine_device=kind[1], engines=engines)
    try:
        placed = bool(place(wanted, facts))
    except PlacementError:
        placed = False
    assert placed == fits(wanted, facts)


@given(clusters, meshes, kinds, st.fixed_dictionaries(asked), st.randoms())
def test_the_order_in_which_nodes_are_listed_changes_nothing(facts, mesh, kind, wish, random) -> None:
    wanted = recipe(world=mesh, device=kind[0], engine_device=kind[1], **wish)
    mixed = list(facts.nodes)
    random.shuffle(mixed)

    def outcome(nodes: tuple[NodeFacts, ...]) -> Any:
        try:
            placement = place(wanted, ClusterFacts(nodes, facts.driver))
        except PlacementError as error:
            return str(error)
        return placement.trainer_devices, placement.engine_devices, placement.bundles

    assert outcome(tuple(mixed)) == outcome(facts.nodes)


def nodes_of(placement: Placement) -> tuple[str, str]:
    return tuple(
        "".join(d.node[1:] for d in devices) for devices in (placement.trainer_devices, placement.engine_devices)
    )


def test_ranks_fill_one_node_after_the_other_and_engines_take_what_is_left() -> None:
    placement = place(recipe(world={"tp": 2, "dp": 3}, engines=3), cluster((16, 5), (16, 4)))
    assert nodes_of(placement) == ("000011", "011")
    assert [device.index for device in placement.trainer_devices] == [0, 1, 2, 3, 0, 1]
    assert [device.index for device in placement.engine_devices] == [4, 2, 3]
    assert Counter(bundle.gpus for bundle in placement.bundles) == {1: 9}


def test_experts_cut_over_more_ranks_than_heads_keep_their_group_on_a_node() -> None:
    wanted = recipe(world={"tp": 1, "etp": 2, "dp": 4}, engines=1)
    assert nodes_of(place(wanted, cluster((9, 3), (9, 3)))) == ("0011", "0")


def test_the_drivers_node_comes_first_and_then_addresses_in_numeric_order() -> None:
    facts = ClusterFacts(
        tuple(NodeFacts(name, name, 1, 0) for name in ("10.0.0.10", "10.0.0.9", "10.0.0.2")), "10.0.0.9"
    )
    placement = place(recipe(world={"dp": 2}, device="cpu"), facts)
    assert [d.node for d in (*placement.trainer_devices, *placement.engine_devices)] == [
        "10.0.0.9",
        "10.0.0.2",
        "10.0.0.10",
    ]


def test_auto_takes_gpus_where_the_cluster_has_any() -> None:
    wanted = recipe(device="auto", engine_device="cpu")
    assert place(wanted, cluster((4, 0))).trainer_devices[0].kind == "cpu"
    assert place(wanted, cluster((4, 0), (4, 1))).trainer_devices[0].kind == "cuda"


def test_engines_on_gpus_come_before_ranks_on_cpus() -> None:
    placement = place(recipe(device="cpu", engine_device="cuda"), cluster((1, 1), (1, 0)))
    assert nodes_of(placement) == ("1", "0")
    assert placement.trainer_devices[0].bundle == 0, "bundles are numbered trainers first"


def test_one_node_talks_over_loopback_and_several_over_their_addresses() -> None:
    near = place(recipe(device="cpu"), cluster((2, 0)))
    assert (near.leaves_the_driver, near.meeting_address, near.engine_host(0, "127.0.0.1")) == (
        False,
        "127.0.0.1",
        "127.0.0.1",
    )
    assert near.engine_host(0, "10.9.9.9") == "10.9.9.9", "on the driver's node alone the recipe's word counts"
    far = place(recipe(device="cpu"), cluster((1, 0), (1, 0)))
    assert (far.leaves_the_driver, far.meeting_address, far.engine_host(0, "127.0.0.1")) == (
        True,
        "127.0.0.1",
        "10.0.0.2",
    )
    wide = place(recipe(world={"dp": 2}, device="cpu"), cluster((1, 0), (2, 0)))
    assert wide.meeting_address == "10.0.0.1"
    elsewhere = place(recipe(device="cpu"), cluster((0, 0), (2, 0)))
    assert (elsewhere.leaves_the_driver, elsewhere.meeting_address) == (True, "127.0.0.1")
    assert elsewhere.engine_host(0, "127.0.0.1") == "10.0.0.2"


def test_trainers_alone_need_no_place_for_engines() -> None:
    placement = place(recipe(engines=4), cluster((1, 1)), engines=False)
    assert (len(placement.bundles), placement.engine_devices) == (1, ())
    colocated = place(recipe(mode="colocated", device="cuda", engine_device="cpu"), cluster((1, 1)), engines=False)
    assert colocated.bundles[0].cpus == 1


def test_the_plan_for_people_names_rank_engine_node_and_device() -> None:
    placement = place(recipe(world={"dp": 2}, mode="colocated"), cluster((2, 1), (2, 1)))
    assert dict(placement.describe()) == {
        "trainer rank 0": "10.0.0.1 cuda:0 (shared)",
        "trainer rank 1": "10.0.0.2 cuda:0",
        "engine 0": "10.0.0.1 cuda:0 (shared)",
    }


@pytest.mark.parametrize(
    ("wanted", "facts", "said"),
    [
        (
            recipe(world={"dp": 4}, engines=2),
            cluster((16, 4), (16, 1)),
            "needs 4 GPUs for 4 trainer ranks + 2 for 2 engines = 6, but 2 nodes have 5 free (10.0.0.1: 16 CPUs, 4 GPUs; "
            "10.0.0.2: 16 CPUs, 1 GPUs); lower train.parallel, lower engine.count, use placement.mode=colocated",
        ),
        (
            recipe(engine_device="cpu"),
            cluster((9, 0)),
            "needs 1 GPU for 1 trainer rank + 0 for 1 engine = 1, but 1 node has 0",
        ),
        (recipe(engine_device="cpu"), cluster((9, 0)), "set train.device=cpu or use a cluster with more nodes"),
        (recipe(device="cpu", engine_device="cuda"), cluster((9, 0)), "set engine.device=cpu or use a cluster"),
        (
            recipe(device="cpu", world={"dp": 3}),
            cluster((3, 0)),
            "needs 3 CPUs for 3 trainer ranks + 1 for 1 engine = 4",
        ),
        (
            recipe(world={"tp": 4, "dp": 2}, engines=1),
            cluster((9, 6), (9, 3)),
            "tensor-parallel groups of 4 ranks stay on one node, and 2 groups are needed, but only 1 find room",
        ),
        (
            recipe(world={"dp": 2}, engines=3, mode="colocated"),
            cluster((9, 9)),
            "there are 3 engines (engine.count) and 2 ranks; lower engine.count to 2",
        ),
        (
            recipe(mode="colocated", engine_device="cpu"),
            cluster((9, 9)),
            "trainers are on cuda (train.device cuda) and engines on cpu (engine.device cpu); set both to the same",
        ),
        (
            recipe(mode="colocated", device="cpu"),
            cluster((1, 0)),
            "needs 1 CPU for 1 trainer rank + 1 for 1 engine = 2, but 1 node has 1 free",
        ),
        (
            recipe(device="cpu", engine_device="cuda"),
            cluster((0, 1), (4, 0)),
            "no process and device on one node for each of 1 engine (engine.count) beside 1 trainer rank (",
        ),
        (
            recipe(device="cpu", engine={"host": "10.0.0.1"}),
            cluster((1, 0), (1, 0)),
            "engine.host 10.0.0.1 is one address, but the run leaves the node of the command; remove it",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(wanted: Recipe, facts: ClusterFacts, said: str) -> None:
    with pytest.raises(PlacementError) as raised:
        place(wanted, facts)
    assert said in str(raised.value)
