"""Nodes of a run: what they must see, over which interface they talk, and what their loss is called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from miles.config import ConfigError
from miles.orchestrate import network, node_watch
from miles.orchestrate.errors import NodeLost, PlacementError, RunError
from miles.orchestrate.network import interface_towards, use_interface_of
from miles.orchestrate.node_files import MARKER, check_nodes, fingerprint, missing
from miles.orchestrate.node_watch import lost_nodes, watching_nodes
from miles.orchestrate.placement import ClusterFacts, NodeFacts, Placement, place


@pytest.fixture
def spread(recipe) -> Placement:
    """Rank 0 on the driver's node a, rank 1 and the engine on node b."""
    nodes = (NodeFacts("a" * 20, "10.0.0.1", 1, 0), NodeFacts("b" * 20, "10.0.0.2", 2, 0))
    return place(recipe(train={"parallel": {"dp": 2}, "device": "cpu"}), ClusterFacts(nodes, "a" * 20))


@pytest.fixture
def alone(recipe) -> Placement:
    return place(recipe(train={"device": "cpu"}), ClusterFacts((NodeFacts("a", "10.0.0.1", 9, 0),), "a"))


def run(placement: Placement, body: Any) -> Any:
    async def inside() -> Any:
        async with watching_nodes(placement):
            return await body()

    return asyncio.run(inside())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "POLL_S", 0.01)
    monkeypatch.setattr(node_watch, "AFTERMATH_S", 0.1)


def test_a_lost_node_ends_a_wait_with_its_name_and_what_it_held(spread, monkeypatch, quick) -> None:
    monkeypatch.setattr(node_watch, "lost_nodes", lambda _: ["b" * 20])
    with pytest.raises(NodeLost) as raised:
        run(spread, lambda: asyncio.sleep(60))
    assert str(raised.value) == (
        "lost node 10.0.0.2 (bbbbbbbb) with trainer rank 1 and engine 0; what was saved is kept: run the same command "
        "again to resume, on the nodes that are left if they have room for it (--dry-run says)"
    )
    assert raised.value.exit_code == 1


def test_after_a_loss_the_command_can_still_wait_for_its_cleanup(spread, monkeypatch, quick) -> None:
    monkeypatch.setattr(node_watch, "lost_nodes", lambda _: ["b" * 20])

    async def body() -> int:
        try:
            async with watching_nodes(spread):
                await asyncio.sleep(60)
        except NodeLost:
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()
        return -1

    assert asyncio.run(body()) == 0


def test_what_other_ranks_make_of_a_lost_node_is_told_as_its_loss(spread, monkeypatch, quick) -> None:
    answers = [[], [], ["b" * 20]]
    monkeypatch.setattr(node_watch, "lost_nodes", lambda _: answers.pop(0) if len(answers) > 1 else answers[0])

    async def fail() -> None:
        raise RunError("rank 0: another rank died")

    monkeypatch.setattr(node_watch, "POLL_S", 0.02)
    with pytest.raises(NodeLost, match=r"lost node 10\.0\.0\.2") as raised:
        run(spread, fail)
    assert str(raised.value.__cause__) == "rank 0: another rank died"


def test_errors_on_nodes_that_are_all_there_stay_what_they_are(spread, monkeypatch, quick) -> None:
    asked = []
    monkeypatch.setattr(node_watch, "lost_nodes", lambda _: asked.append(1) or [])

    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(RunError, match="own fault"):
        run(spread, lambda: fail(RunError("own fault")))
    assert asked
    asked.clear()
    with pytest.raises(ConfigError, match="user's fault"):
        run(spread, lambda: fail(ConfigError("user's fault")))
    assert not asked, "what the user must mend is said at once"

    async def interrupt() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(spread, interrupt)

    async def result() -> str:
        return "done"

    assert run(spread, result) == "done"


def test_a_run_on_the_drivers_node_alone_is_not_watched(alone, monkeypatch, quick) -> None:
    monkeypatch.setattr(node_watch, "lost_nodes", lambda _: ["a"])

    async def result() -> str:
        await asyncio.sleep(0.05)
        return "done"

    assert run(alone, result) == "done"


def test_a_node_is_lost_when_ray_says_so_or_its_daemon_refuses(spread, monkeypatch) -> None:
    def entry(name: str, port: int, alive: bool = True) -> dict[str, Any]:
        return {"NodeID": name * 20, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}

    table: list[dict[str, Any]] = []
    fake = ModuleType("ray")
    fake.nodes = lambda: table
    monkeypatch.setitem(sys.modules, "ray", fake)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        up, down = server.getsockname()[1], closed.getsockname()[1]
        table[:] = [entry("a", up), entry("b", up), entry("c", down)]
        assert lost_nodes(spread) == [], "other nodes of the cluster do not matter"
        table[:] = [entry("a", up), entry("b", down)]
        assert lost_nodes(spread) == ["b" * 20]
        table[:] = [entry("a", up), entry("b", up, alive=False)]
        assert lost_nodes(spread) == ["b" * 20]
        table[:] = [entry("a", up)]
        assert lost_nodes(spread) == ["b" * 20]


def model(folder: Path, weights: bytes = b"1234", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_models_fingerprint_is_its_files_and_its_configuration(tmp_path: Path) -> None:
    whole = fingerprint(model(tmp_path / "a"))
    assert whole == fingerprint(model(tmp_path / "b"))
    assert whole != fingerprint(model(tmp_path / "c", weights=b"123"))
    assert whole != fingerprint(model(tmp_path / "d", config="[]"))
    assert fingerprint(tmp_path / "nothing") is None


def test_a_node_names_the_folders_that_it_does_not_see(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    marker = tmp_path / "run" / MARKER
    marker.parent.mkdir()
    wanted = {str(path): fingerprint(path)}
    assert missing(marker, "token", wanted, wait_s=0.0) == [str(marker.parent)]
    marker.write_text("of another run")
    assert missing(marker, "token", wanted, wait_s=0.0) == [str(marker.parent)]
    marker.write_text("token")
    assert missing(marker, "token", wanted, wait_s=0.0) == []
    assert missing(marker, "token", {str(path): "another"}, wait_s=0.0) == [str(path)]


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    marker = tmp_path / MARKER
    late = threading.Timer(0.3, marker.write_text, ("token",))
    late.start()
    assert missing(marker, "token", {}, wait_s=20.0) == []
    late.join()


class Reservation:
    """Runs a task here, as the node of `sees` would: with its own view of a path."""

    def __init__(self, placement: Placement, blind: str, error: Exception | None = None) -> None:
        self.placement, self.blind, self.error, self.asked = placement, blind, error, []

    def task(self, function: Any, bundle: int) -> Any:
        node = self.placement.bundles[bundle].node

        def remote(marker: Path, token: str, models: dict[str, str | None]) -> Any:
            self.asked.append(node)
            if self.error is not None and node == self.blind:
                return self.error
            path = marker.parent / "nowhere" / MARKER if node == self.blind else marker
            return function(path, token, models, 0.0)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("ray")
    fake.exceptions = SimpleNamespace(
        RayError=type("RayError", (Exception,), {}), GetTimeoutError=type("GetTimeoutError", (Exception,), {})
    )

    def get(value: Any, timeout: float) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    fake.get = get
    monkeypatch.setitem(sys.modules, "ray", fake)


def test_a_node_without_the_shared_folders_is_refused_by_its_address(spread, got, tmp_path: Path) -> None:
    reservation = Reservation(spread, "b" * 20)
    with pytest.raises(PlacementError) as raised:
        check_nodes(reservation, spread, tmp_path, [model(tmp_path / "model")])
    assert str(raised.value).startswith(f"node 10.0.0.2 does not see {tmp_path}/nowhere as this node does; use storage")
    assert sorted(set(reservation.asked)) == ["a" * 20, "b" * 20]
    assert not (tmp_path / MARKER).exists()
    check_nodes(Reservation(spread, "none"), spread, tmp_path, [tmp_path / "model"])


def test_a_node_without_miles_or_without_an_answer_is_named(spread, got, tmp_path: Path) -> None:
    errors = sys.modules["ray"].exceptions
    lost = errors.RayError("trace\nModuleNotFoundError: No module named 'miles'")
    with pytest.raises(PlacementError, match=r"node 10\.0\.0\.2: Miles cannot be imported there \(ModuleNotFoundError"):
        check_nodes(Reservation(spread, "b" * 20, lost), spread, tmp_path, [])
    with pytest.raises(RunError, match=r"node 10\.0\.0\.2: no process answered within 60 s"):
        check_nodes(Reservation(spread, "b" * 20, errors.GetTimeoutError()), spread, tmp_path, [])
    with pytest.raises(RunError, match=r"node 10\.0\.0\.2: it broke; run the same command again"):
        check_nodes(Reservation(spread, "b" * 20, errors.RayError("it broke")), spread, tmp_path, [])
    assert not (tmp_path / MARKER).exists()


def test_nodes_are_not_asked_while_everything_is_on_the_drivers(alone, tmp_path: Path) -> None:
    check_nodes(None, alone, tmp_path, [])  # type: ignore[arg-type]


def test_the_interface_is_the_one_that_a_route_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict(socket.if_nameindex())
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("127.0.0.77") == "lo"
    assert interface_towards("127.0.0.1") in names.values()
    for variable in network.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    use_interface_of("127.0.0.2")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "mine")
    with contextlib.suppress(KeyError):
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_an_address_without_a_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.psutil, "net_if_addrs", dict)
    with pytest.raises(PlacementError, match=r"no interface has the address 127\.0\.0\.1"):
        interface_towards("127.0.0.1")
