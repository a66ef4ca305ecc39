"""Every data path does the same job; each has faults of its own."""

import contextlib
import json
import shutil
import socket
import threading

import pytest
import torch
from sync_engines import same, status, zeros_like

from miles.config import ConfigError
from miles.rollout.engines.embedded.weight_group import WeightGroup
from miles.sync.config import SyncConfig
from miles.sync.errors import NoEngineLeft, PlanError, SourceError, SyncOptionError
from miles.weight_wire.bucket import WeightWireError
from miles.weight_wire.folder import WeightFolder, write_folder
from miles.weight_wire.table import EngineTable, ParamEntry

TRANSPORTS = ["tensor", "broadcast", "disk", "disk_delta"]


def config(transport, **changes):
    return SyncConfig(**{"transport": transport, "timeout_s": 5.0, "bucket_bytes": 1 << 16, **changes})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_equals_trainer_after_sync(start_engine, pusher_for, tiny_weights, transport):
    engines = [start_engine(zeros_like(tiny_weights)) for _ in range(2)]
    pusher = pusher_for(*engines, config=config(transport))
    for version in (1, 2, 3):
        weights = {name: tensor * version for name, tensor in tiny_weights.items()}
        report = pusher.push(weights.items(), version)
        assert (report.transport, set(report.engines.values())) == (transport, {"serving"})
        for engine in engines:
            assert same(engine.parameters, weights)
            assert (status(engine)["weight_version"], status(engine)["plan_digest"]) == (
                str(version),
                report.plan_digest,
            )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fused_and_cast_destinations(start_engine, pusher_for, transport):
    names = tuple(f"{part}.{expert}" for expert in range(2) for part in ("gate", "up"))
    entries = (
        ParamEntry("qkv", (8, 4), "bfloat16", fused_from=("q", "k", "v"), num_shards=3),
        ParamEntry("experts", (2, 6, 4), "float32", fused_from=names, num_shards=2, num_local_experts=2),
    )
    table = EngineTable(entries=entries)
    dtypes = {"qkv": torch.bfloat16, "experts": torch.float32}
    engine = start_engine({e.name: torch.zeros(e.shape, dtype=dtypes[e.name]) for e in entries}, table=table)
    pusher = pusher_for(engine, config=config(transport))
    for version in (1, 2):
        weights = {"q": torch.randn(4, 4), "k": torch.randn(2, 4), "v": torch.randn(2, 4)}
        weights |= {name: torch.randn(3, 4) for name in names}
        pusher.push(weights.items(), version)
        fused = torch.cat([weights["q"], weights["k"], weights["v"]]).bfloat16()
        assert torch.equal(engine.parameters["qkv"], fused)
        packed = torch.stack([torch.cat([weights[f"gate.{e}"], weights[f"up.{e}"]]) for e in range(2)])
        assert torch.equal(engine.parameters["experts"], packed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unknown_name_is_fatal_on_every_transport(start_engine, pusher_for, tiny_weights, transport):
    engine = start_engine(zeros_like(tiny_weights))
    with pytest.raises(PlanError, match="stray has no destination"):
        pusher_for(engine, config=config(transport)).push([*tiny_weights.items(), ("stray", torch.zeros(2))], 1)
    assert status(engine)["weight_version"] == "0"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_refused_source_is_never_served_and_the_next_version_is(start_engine, pusher_for, tiny_weights, transport):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine, config=config(transport))
    pusher.push(tiny_weights.items(), 1)
    bad = {**tiny_weights, "model.norm.weight": torch.full((64,), float("inf"))}
    with pytest.raises(SourceError, match="64 of 64 values are not finite"):
        pusher.push(bad.items(), 2)
    assert status(engine)["weight_version"] == "1"
    report = pusher.push(tiny_weights.items(), 3)
    assert set(report.engines.values()) == {"serving"}
    assert same(engine.parameters, tiny_weights)


@pytest.mark.parametrize("transport", ["tensor", "broadcast", "disk"])
def test_mixed_layouts_in_one_sync(start_engine, pusher_for, transport):
    weights = {"w": torch.randn(4, 6), "norm": torch.randn(6)}

    def engine(tp, rank):
        entries = (ParamEntry("w", (4 // tp, 6), "float32", shard_dim=0), ParamEntry("norm", (6,), "float32"))
        table = EngineTable(entries=entries, tp=tp, engine_rank=rank)
        return start_engine({e.name: torch.zeros(e.shape) for e in entries}, table=table)

    whole, left, right = engine(1, 0), engine(2, 0), engine(2, 1)
    report = pusher_for(whole, left, right, config=config(transport)).push(weights.items(), 1)
    assert set(report.engines.values()) == {"serving"}
    assert torch.equal(whole.parameters["w"], weights["w"])
    assert torch.equal(torch.cat([left.parameters["w"], right.parameters["w"]]), weights["w"])


def test_broadcast_group_is_rebuilt_when_the_membership_changed(start_engine, pusher_for, tiny_weights):
    first, second, third = (start_engine(zeros_like(tiny_weights)) for _ in range(3))
    pusher = pusher_for(first, second, config=config("broadcast", timeout_s=1.0))
    pusher.push(tiny_weights.items(), 1)
    pusher.push(tiny_weights.items(), 2)
    second.stop()
    # A dead member may break the collective for all; the next sync must not care.
    with contextlib.suppress(NoEngineLeft):
        assert second.url in pusher.push(tiny_weights.items(), 3).failed
    pusher.set_engines([first.url, third.url])
    report = pusher.push(tiny_weights.items(), 4)
    assert report.engines == {first.url: "serving", third.url: "serving"}
    groups = [body["group_name"] for path, body in first.seen if path == "/init_weights_update_group"]
    assert len(groups) == len(set(groups)) >= 2
    assert all(name.startswith("run-") for name in groups)


def test_broadcast_corruption_makes_dirty(start_engine, pusher_for, tiny_weights, monkeypatch):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine, config=config("broadcast", timeout_s=1.0))
    pusher.push(tiny_weights.items(), 1)
    receive = WeightGroup.receive

    def flipped(self, nbytes):
        buffer = receive(self, nbytes)
        buffer[nbytes // 2] ^= 1
        return buffer

    monkeypatch.setattr(WeightGroup, "receive", flipped)
    with pytest.raises(NoEngineLeft, match="digest_mismatch"):
        pusher.push(tiny_weights.items(), 2)
    monkeypatch.undo()
    assert status(engine)["state"] == "dirty"
    pusher.push(tiny_weights.items(), 3)
    assert status(engine)["state"] == "serving"


def test_port_taken_twice():
    """Two trainers that rendezvous at once each hold their own open port; no third can have taken it."""
    groups, failures = [], []

    def trainer(number):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        common = {"address": "127.0.0.1", "port": port, "size": 2, "backend": "gloo", "timeout_s": 10.0}

        def engine():
            try:
                group = WeightGroup(f"g{number}", rank=1, **common)
                groups.append((number, group.receive(4).clone()))
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=engine)
        thread.start()
        group = WeightGroup(f"g{number}", rank=0, listen_fd=listener.detach(), **common)
        group.send(torch.full((4,), number, dtype=torch.uint8))
        thread.join(10)

    threads = [threading.Thread(target=trainer, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures
    assert sorted((number, data.tolist()) for number, data in groups) == [(1, [1] * 4), (2, [2] * 4)]


def test_disk_folder_is_a_hugging_face_checkpoint_with_a_seal(start_engine, pusher_for, tiny_weights, tmp_path):
    pusher = pusher_for(start_engine(zeros_like(tiny_weights)), config=config("disk"))
    for version in (1, 2, 3):
        pusher.push(tiny_weights.items(), version)
        if version == 2:
            # Somebody tidied up: what is gone need not be removed, and nothing stops.
            shutil.rmtree(tmp_path / "sync" / "weights_1")
    folders = sorted(path.name for path in (tmp_path / "sync").iterdir())
    assert folders == ["weights_2", "weights_3"], "only the newest two versions stay, and nothing half-written"
    index = json.loads((tmp_path / "sync" / "weights_3" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tiny_weights.keys()
    assert len(set(index["weight_map"].values())) > 1, "shards are bounded"


@pytest.mark.parametrize("fault", ["byte", "missing_shard", "no_seal", "other_run"])
def test_damaged_disk_folder_makes_dirty_before_anything_is_loaded(
    start_engine, pusher_for, tiny_weights, tmp_path, fault
):
    engine = start_engine(zeros_like(tiny_weights))

    def damage(path, body):
        folder = tmp_path / "sync" / "weights_1"
        if path == "/begin_weight_update" and fault == "byte":
            with open(folder / "model-00001.safetensors", "r+b") as file:
                file.seek(-3, 2)
                file.write(b"\x7f")
        elif path == "/begin_weight_update" and fault == "missing_shard":
            (folder / "model-00002.safetensors").unlink()
        elif path == "/begin_weight_update" and fault == "no_seal":
            (folder / "DONE").unlink()
        elif path == "/begin_weight_update":
            seal = json.loads((folder / "DONE").read_text())
            (folder / "DONE").write_text(json.dumps({**seal, "run_id": "yesterday"}))
        return body

    engine.intercept = damage
    with pytest.raises(NoEngineLeft, match="bad_wire"):
        pusher_for(engine, config=config("disk")).push(tiny_weights.items(), 1)
    assert status(engine)["state"] == "dirty"
    assert all(tensor.eq(0).all() for tensor in engine.parameters.values())


def test_disk_without_a_folder_names_the_option(start_engine, tiny_weights):
    from miles.sync.session import WeightPusher

    with WeightPusher([start_engine(zeros_like(tiny_weights)).url], config("disk"), "run") as pusher:
        with pytest.raises(SyncOptionError, match=r"sync\.transport=disk needs .* set sync\.directory"):
            pusher.push(tiny_weights.items(), 1)


def test_disk_that_cannot_be_written_names_the_folder(start_engine, tiny_weights, tmp_path):
    from miles.sync.session import WeightPusher

    (tmp_path / "file").write_text("")
    settings = config("disk", directory=str(tmp_path / "file" / "below"))
    with WeightPusher([start_engine(zeros_like(tiny_weights)).url], settings, "run") as pusher:
        with pytest.raises(ConfigError, match="file; choose another folder"):
            pusher.push(tiny_weights.items(), 1)


def test_an_interrupted_write_leaves_no_folder(tmp_path):
    def weights():
        yield "a", torch.zeros(10)
        raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError):
        write_folder(tmp_path, weights(), run_id="r", version=1, shard_bytes=16)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path, [("a", torch.zeros(10))], run_id="r", version=1, shard_bytes=16)
    assert WeightFolder(tmp_path / "weights_1", run_id="r", version=1).shapes == {"a": (10,)}
    shutil.rmtree(tmp_path / "weights_1")
    with pytest.raises(WeightWireError, match="not a complete weight folder"):
        WeightFolder(tmp_path / "weights_1", run_id="r", version=1)
