"""A Ray cluster that is there already: which one is meant, what is read of it, and that it is left alone."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from miles.orchestrate import joined_cluster as module
from miles.orchestrate import placed_cluster
from miles.orchestrate.errors import ClusterError, PlacementError
from miles.orchestrate.joined_cluster import cluster_address, joined_cluster, read_facts
from miles.orchestrate.placement import ClusterFacts, NodeFacts
from miles.recipe.placement import ClusterConfig


@pytest.mark.parametrize(
    ("configured", "exported", "chosen"),
    [
        (None, None, None),
        (None, "", None),
        ("local", None, None),
        (None, "local", None),
        ("auto", None, "auto"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        ("head:6379", "head:6379", "head:6379"),
        ("[fd00::1]:6379", None, "[fd00::1]:6379"),
    ],
)
def test_recipe_or_environment_name_the_cluster(monkeypatch, configured, exported, chosen) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if exported is not None:
        monkeypatch.setenv("RAY_ADDRESS", exported)
    assert cluster_address(ClusterConfig(address=configured)) == chosen


@pytest.mark.parametrize(
    ("configured", "exported"), [("a:1", "b:1"), ("local", "b:1"), ("a:1", "local"), ("auto", "b:1")]
)
def test_a_disagreement_is_refused_and_neither_is_ignored(monkeypatch, configured: str, exported: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", exported)
    with pytest.raises(ClusterError, match=f"cluster.address is {configured}, but .*RAY_ADDRESS is {exported}; remove"):
        cluster_address(ClusterConfig(address=configured))


def test_an_address_in_the_environment_is_checked_like_one_in_the_recipe(monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ClusterError, match=r"RAY_ADDRESS: ray://head:10001 is Ray's client protocol") as raised:
        cluster_address(ClusterConfig())
    assert raised.value.exit_code == 2


def test_nobody_at_the_address_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"127\.0\.0\.1:{port}: nothing answers there \(Connection refused\)"):
            with joined_cluster(f"127.0.0.1:{port}"):
                pytest.fail("nothing was joined")


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name,
        "Alive": alive,
        "NodeManagerAddress": f"address of {name}",
        "NodeManagerPort": 1,
        "Resources": {"memory": 7.0, **resources},
    }


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Ray that records what is asked of it."""
    fake = ModuleType("ray")
    fake.calls = []
    fake.init = lambda **options: fake.calls.append(options)
    fake.shutdown = lambda: fake.calls.append("shutdown")
    fake.nodes = lambda: [node("a", CPU=4.0), node("gone", alive=False, CPU=9.0), node("b", CPU=2.0, GPU=2.0)]
    fake.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "b")
    private = ModuleType("ray._private")
    private.state = SimpleNamespace(
        available_resources_per_node=lambda: {"a": {"CPU": 0.5}, "b": {"CPU": 1.0, "GPU": 1.0}}
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray._private", private)
    return fake


def test_a_cluster_is_joined_with_its_own_settings_and_only_left(ray, monkeypatch) -> None:
    monkeypatch.setattr(module, "_knock", lambda address: None)
    with joined_cluster("head:6379"):
        (options,) = ray.calls
        assert options["address"] == "head:6379"
        assert not {"num_cpus", "num_gpus", "_temp_dir", "object_store_memory"} & set(options)
    assert ray.calls[1:] == ["shutdown"], "which disconnects a driver that did not start the cluster"


def test_a_cluster_that_does_not_take_the_driver_says_why(ray, monkeypatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("wrong token\nmore")

    monkeypatch.setattr(module, "_knock", lambda address: None)
    ray.init = refuse
    with pytest.raises(ClusterError, match=r"cluster\.address head:6379: wrong token; start the command on a node of"):
        with joined_cluster("head:6379"):
            pytest.fail("nothing was joined")


def test_a_joined_cluster_keeps_no_handlers(ray, monkeypatch) -> None:
    monkeypatch.setattr(module, "_knock", lambda address: None)

    @contextlib.contextmanager
    def keeping(*stops):
        yield lambda: ray.calls.append("handlers are back")

    monkeypatch.setattr(module, "keeping_signal_handlers", keeping)
    with joined_cluster("head:6379"):
        assert ray.calls[1:] == ["handlers are back"]


def test_a_cluster_that_answers_nothing_is_neither_joined_nor_left_for_ever(ray, monkeypatch) -> None:
    for name, value in (("_knock", lambda address: None), ("JOIN_LIMIT_S", 0.1), ("LEAVE_LIMIT_S", 0.1)):
        monkeypatch.setattr(module, name, value)
    release, unregistered = threading.Event(), []
    monkeypatch.setattr(module.atexit, "unregister", unregistered.append)
    ray.shutdown = lambda: release.wait(60)
    with joined_cluster("head:6379"):
        pass
    assert unregistered == [ray.shutdown]
    ray.init = lambda **_: release.wait(60)
    with pytest.raises(ClusterError, match=r"cluster\.address head:6379: no answer for 0\.1 s; start the command"):
        with joined_cluster("head:6379"):
            pytest.fail("nothing was joined")
    release.set()


def test_living_nodes_are_read_with_all_they_have_or_with_what_is_free(ray) -> None:
    whole = ClusterFacts((NodeFacts("a", "address of a", 4, 0, 7), NodeFacts("b", "address of b", 2, 2, 7)), "b")
    assert read_facts(free=False) == whole
    free = ClusterFacts((NodeFacts("a", "address of a", 0, 0, 7), NodeFacts("b", "address of b", 1, 1, 7)), "b")
    assert read_facts(free=True) == free


def facts(cpus: int) -> ClusterFacts:
    return ClusterFacts((NodeFacts("a", "a", cpus, 0),), "a")


def test_devices_in_use_are_waited_for_and_a_cluster_that_is_too_small_is_not(recipe, monkeypatch) -> None:
    free = [0, 1, 2]
    monkeypatch.setattr(placed_cluster, "POLL_S", 0.001)
    monkeypatch.setattr(placed_cluster, "read_facts", lambda *, free: facts(waits.pop(0) if free else 2))
    waits = list(free)
    assert len(placed_cluster.place_when_free(recipe()).bundles) == 2
    assert waits == []
    waits = [1] * 1000
    with pytest.raises(PlacementError, match=r"has 1 free .*\(others use the rest .*waited cluster\.wait_s 0\.01 s\)"):
        placed_cluster.place_when_free(recipe(cluster={"wait_s": 0.01}))
    waits = []
    with pytest.raises(PlacementError, match=r"= 3, but 1 node has 2 free"):
        placed_cluster.place_when_free(recipe(engine={"count": 2}))
