"""Sparse updates on disk: chains, wrong bases, damaged links, bitwise exactness."""

import pytest
import torch
from safetensors import safe_open
from sync_engines import same, zeros_like

from miles.sync.config import DeltaConfig, SyncConfig
from miles.sync.errors import SyncOptionError
from miles.weight_wire.bucket import WeightWireError
from miles.weight_wire.delta import WeightDelta, write_delta
from miles.weight_wire.table import EngineTable, ParamEntry


def config(**changes):
    return SyncConfig(**{"transport": "disk_delta", "timeout_s": 5.0, "bucket_bytes": 1 << 16, **changes})


def nudged(weights, version, share=0.01):
    """About `share` of all elements differ from version to version."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < share, t + version, t)
        for name, t in weights.items()
    }


def disk_messages(engine):
    return [body for path, body in engine.seen if path == "/update_weights_from_disk"]


def test_delta_chain_and_wrong_base(start_engine, pusher_for, tiny_weights, tmp_path):
    engine, late = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine, config=config(delta=DeltaConfig(max_chain=3)))
    full = pusher.push(tiny_weights.items(), 1).nbytes
    weights = tiny_weights
    for version in (2, 3):
        weights = nudged(weights, version)
        assert pusher.push(weights.items(), version).nbytes < full / 4
        assert same(engine.parameters, weights)
    # Joins late: the base and the whole chain.
    pusher.set_engines([engine.url, late.url])
    weights = nudged(weights, 4)
    pusher.push(weights.items(), 4)
    assert same(late.parameters, weights)
    assert len(disk_messages(late)[-1]["deltas"]) == 3
    assert pusher._transport.capabilities()["chain"] == 3
    # The chain is full: the next version is written whole and the old files go.
    weights = nudged(weights, 5)
    pusher.push(weights.items(), 5)
    assert disk_messages(engine)[-1]["load_format"] == "safetensors"
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == ["weights_5"]
    # Somebody changed the engine's weights behind our back: a wrong base is noticed and healed by a full reload.
    engine.parameters["model.norm.weight"].add_(1)
    weights = nudged(weights, 6)
    report = pusher.push(weights.items(), 6)
    assert report.engines == {engine.url: "serving", late.url: "serving"}
    assert [body["load_format"] for body in disk_messages(engine)[-2:]] == ["miles_delta", "safetensors"]
    assert disk_messages(late)[-1]["load_format"] == "miles_delta"
    assert same(engine.parameters, weights)
    assert same(late.parameters, weights)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_missing_or_damaged_delta_link_is_healed_by_a_full_reload(
    start_engine, pusher_for, tiny_weights, tmp_path, fault
):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine, config=config())
    pusher.push(tiny_weights.items(), 1)
    link = tmp_path / "sync" / "delta_1_2.safetensors"

    def damage(path, body):
        if path == "/begin_weight_update" and link.exists():
            if fault == "missing":
                link.unlink()
            else:
                with open(link, "r+b") as file:
                    file.seek(-2, 2)
                    file.write(b"\x3c")
        return body

    engine.intercept = damage
    weights = nudged(tiny_weights, 2)
    report = pusher.push(weights.items(), 2)
    assert report.engines == {engine.url: "serving"}
    assert same(engine.parameters, weights)
    assert disk_messages(engine)[-1]["load_format"] == "safetensors"


def test_delta_takes_the_smaller_form_per_tensor_and_is_bitwise(tmp_path):
    old = {"few": torch.zeros(1000), "all": torch.zeros(1000), "same": torch.ones(10), "signed": torch.zeros(8)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["few"][[3, 7]] = float("nan")
    new["all"] += 1
    new["signed"] = -new["signed"]
    written = write_delta(tmp_path, old, new, run_id="r", base=1, version=2)
    with safe_open(written.path, framework="pt") as file:
        sizes = {key: file.get_tensor(key).numel() for key in file.keys()}  # noqa: SIM118 - no mapping
    assert sizes == {"few/idx": 2, "few/val": 2, "all/full": 1000, "same/idx": 0, "same/val": 0, "signed/full": 8}
    assert written.nbytes < 1000 * 4 + 2000
    delta = WeightDelta(written.path, run_id="r", base=1, version=2)
    for name, tensor in new.items():
        result = delta.apply(name, old[name])
        assert torch.equal(result.view(torch.int32), tensor.view(torch.int32)), name
    with pytest.raises(WeightWireError, match="is not the base this delta starts from"):
        delta.apply("few", new["few"])
    with pytest.raises(WeightWireError, match="expected"):
        WeightDelta(written.path, run_id="r", base=2, version=2)


@pytest.mark.parametrize(
    "changed", [{"run_id": "other"}, {"base": 0}, {"version": 3}, {"run_id": ""}, {"base": 2, "version": 1}]
)
def test_a_delta_of_another_run_base_or_version_is_refused(tmp_path, changed):
    written = write_delta(tmp_path, {"w": torch.zeros(4)}, {"w": torch.ones(4)}, run_id="r", base=1, version=2)
    expected = {"run_id": "r", "base": 1, "version": 2}
    WeightDelta(written.path, **expected)
    with pytest.raises(WeightWireError, match=r"holds .*'r', '1', '2'"):
        WeightDelta(written.path, **{**expected, **changed})


def test_a_delta_of_another_schema_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("miles.weight_wire.delta.SCHEMA", 2)
        written = write_delta(tmp_path, {"w": torch.zeros(4)}, {"w": torch.ones(4)}, run_id="r", base=1, version=2)
    with pytest.raises(WeightWireError, match=r"holds .*'2', 'r'"):
        WeightDelta(written.path, run_id="r", base=1, version=2)


def test_a_result_of_another_digest_or_shape_is_refused(tmp_path):
    old, new = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    written = write_delta(tmp_path, old, new, run_id="r", base=1, version=2)
    delta = WeightDelta(written.path, run_id="r", base=1, version=2)
    shape, before, after = delta._table["w"]
    delta._table["w"] = [shape, before, hex(int(after, 16) + 1)]
    with pytest.raises(WeightWireError, match="damaged"):
        delta.apply("w", old["w"])
    delta._table["w"] = [shape, before, after]
    with pytest.raises(WeightWireError, match="damaged"):
        delta.apply("w", old["w"].reshape(2, 2))


def test_delta_refuses_tensor_parallel_engines_by_name(start_engine, pusher_for):
    table = EngineTable(entries=(ParamEntry("w", (2, 2), "float32", shard_dim=0),), tp=2)
    engine = start_engine({"w": torch.zeros(2, 2)}, table=table)
    with pytest.raises(
        SyncOptionError, match=r"sync\.transport=disk_delta .* tensor parallelism; use sync\.transport=disk"
    ):
        pusher_for(engine, config=config()).push([("w", torch.zeros(4, 2))], 1)
