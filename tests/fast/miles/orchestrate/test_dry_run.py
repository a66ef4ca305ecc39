"""`miles train --dry-run` shows where everything would go, and refuses what has no place."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from rich.console import Console

from miles.config import ConfigError
from miles.orchestrate import machine, startable
from miles.orchestrate.dry_run import describe
from miles.orchestrate.placement import ClusterFacts, NodeFacts
from miles.recipe import load

QUICKSTART = Path(__file__).resolve().parents[4] / "recipes" / "quickstart.yaml"


def shown(*sets: str) -> str:
    out = io.StringIO()
    describe(load(QUICKSTART, sets), sets, Console(file=out, width=160))
    return " ".join(out.getvalue().split())


def test_every_rank_and_engine_is_shown_with_node_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (NodeFacts("a", "10.0.0.1", 4, 2), NodeFacts("b", "10.0.0.2", 4, 1))
    asked = []
    monkeypatch.setattr(startable, "known_facts", lambda config: asked.append(config) or ClusterFacts(nodes, "a"))
    said = shown("cluster.address='10.0.0.1:6379'", "train.parallel.tp=2", "engine.device=cuda")
    for line in ("trainer rank 0 │ 10.0.0.1 cuda:0", "trainer rank 1 │ 10.0.0.1 cuda:1", "engine 0 │ 10.0.0.2 cuda:0"):
        assert line in said
    assert asked[0].address == "10.0.0.1:6379"


def test_this_machine_is_the_cluster_when_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    assert "trainer rank 0 │ 127.0.0.1 cpu:0" in shown()
    with pytest.raises(ConfigError, match=r"needs 2 GPUs for 2 trainer ranks \+ 0 for 1 engine = 2, but 1 node has 0"):
        shown("train.device=cuda", "train.parallel.dp=2")
    with pytest.raises(ConfigError, match=r"needs 1000000 CPUs for 1000000 trainer ranks .* has 1024 free"):
        shown("train.parallel.dp=1000000")


def test_gpus_are_counted_only_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(machine, "DRIVERS", (tmp_path / "nvidiactl", tmp_path / "kfd"))
    assert machine.visible_gpus() == 0
    (tmp_path / "kfd").touch()
    assert machine.visible_gpus() == 3
    assert machine.this_machine().nodes[0].gpus == 3


def test_the_named_cluster_is_asked_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles.orchestrate import placed_cluster
    from miles.recipe.placement import ClusterConfig

    events = []

    @contextlib.contextmanager
    def joined(address: str):
        events.append(f"join {address}")
        yield
        events.append("leave")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placed_cluster, "joined_cluster", joined)
    monkeypatch.setattr(placed_cluster, "read_facts", lambda *, free: events.append(f"free={free}") or "facts")
    assert placed_cluster.known_facts(ClusterConfig(address="head:1")) == "facts"
    assert events == ["join head:1", "free=False", "leave"]
