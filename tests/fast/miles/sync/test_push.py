"""Whole pushes over real HTTP and shared memory into engines on their own sockets."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sync_engines import ask, same, status, zeros_like

from miles.sync.config import SyncConfig
from miles.sync.entry import SourceSpec
from miles.sync.errors import NoEngineLeft, PlanError, SourceError, SyncBusyError, SyncError
from miles.weight_wire.table import EngineTable, ParamEntry


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_engine_equals_trainer_after_sync(start_engine, pusher_for, tiny_weights, bucket_bytes):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine, config=SyncConfig(bucket_bytes=bucket_bytes))
    for version in (1, 2, 3):
        weights = {name: tensor + version for name, tensor in tiny_weights.items()}
        report = pusher.push(weights.items(), version)
        assert same(engine.parameters, weights)
        assert report.engines == {engine.url: "serving"}
    assert report.nbytes >= sum(t.numel() * 4 for t in tiny_weights.values())
    assert (report.buckets > 5) == (bucket_bytes == 4096)
    state = status(engine)
    assert (state["state"], state["weight_version"], state["plan_digest"]) == ("serving", "3", report.plan_digest)
    assert engine.host.pauses == ["retract"] * 3
    assert not engine.host.paused


def test_the_destinations_dtype_decides(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights, torch.bfloat16))
    pusher_for(engine).push(tiny_weights.items(), 1)
    assert same(engine.parameters, {name: tensor.bfloat16() for name, tensor in tiny_weights.items()})


def test_streamed_weights_need_no_list_when_the_weight_map_is_given(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    alive = []

    def stream():
        for name, tensor in tiny_weights.items():
            alive.append(name)
            yield name, tensor.clone()

    weight_map = {name: SourceSpec(tuple(t.shape), "float32") for name, t in tiny_weights.items()}
    report = pusher_for(engine).push(stream(), 1, weight_map=weight_map)
    assert report.tensors == len(alive) == len(tiny_weights)
    assert same(engine.parameters, tiny_weights)


def test_unknown_name_is_fatal_on_every_transport(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    with pytest.raises(PlanError, match="stray has no destination"):
        pusher_for(engine).push([*tiny_weights.items(), ("stray", torch.zeros(2))], 1)
    assert status(engine)["weight_version"] == "0"
    assert not engine.seen, "the engine was touched although the plan was refused"


@pytest.mark.parametrize("where", ["byte", "name"])
def test_corrupt_byte_makes_dirty(start_engine, pusher_for, tiny_weights, where):
    engine = start_engine(zeros_like(tiny_weights))

    def corrupt(path, body):
        if path == "/update_weights_from_tensor" and where == "byte":
            handle = body["handle"]
            with open(f"/proc/{handle['pid']}/fd/{handle['fd']}", "r+b") as memory:
                memory.seek(1001)
                byte = memory.read(1)[0]
                memory.seek(1001)
                memory.write(bytes([byte ^ 4]))
        elif path == "/update_weights_from_tensor":
            body["bucket"]["pieces"][3][0] = "renamed.on.the.way"
        return body

    engine.intercept = corrupt
    pusher = pusher_for(engine)
    with pytest.raises(NoEngineLeft, match={"byte": "digest_mismatch", "name": "unknown_name"}[where]):
        pusher.push(tiny_weights.items(), 1)
    assert status(engine)["state"] == "dirty"
    code, body = ask(engine.url, "/generate", {})
    assert (code, body["error"]["type"]) == (503, "weights_dirty")
    engine.intercept = lambda path, body: body
    pusher.push(tiny_weights.items(), 2)
    assert ask(engine.url, "/generate", {})[1]["weight_version"] == "2"
    assert same(engine.parameters, tiny_weights)


def test_non_finite_weights_are_never_served(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine)
    pusher.push(tiny_weights.items(), 1)
    bad = {**tiny_weights, "model.norm.weight": tiny_weights["model.norm.weight"].clone()}
    bad["model.norm.weight"][[3, 5]] = torch.tensor([float("nan"), float("inf")])
    drained = []
    with pytest.raises(SourceError, match=r"model\.norm\.weight: 2 of 64 values are not finite"):
        pusher.push(((name, drained.append(name) or tensor) for name, tensor in bad.items()), 2)
    assert len(drained) == len(bad), "the other ranks of the mesh would wait for this iterator"
    state = status(engine)
    assert (state["state"], state["weight_version"]) == ("dirty", "1")
    pusher.push(tiny_weights.items(), 3)
    assert status(engine)["state"] == "serving"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"other": torch.zeros(1)}, "other is not in the plan"),
        (
            lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"},
            r"no tensor for 1 planned weights: model\.norm",
        ),
        (lambda w: w | {"model.norm.weight": torch.zeros(3)}, r"\[3\] torch.float32 offered, \[64\] float32 planned"),
        (lambda w: w | {"model.norm.weight": torch.zeros(64).half()}, "torch.float16 offered"),
    ],
)
def test_weights_that_leave_the_plan_are_fatal(start_engine, pusher_for, tiny_weights, change, message):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine)
    pusher.push(tiny_weights.items(), 1)
    with pytest.raises(SourceError, match=message):
        pusher.push(change(tiny_weights).items(), 2)
    assert status(engine)["state"] == "dirty"


def test_mixed_layouts_tp1_tp2_in_one_sync(start_engine, pusher_for):
    weights = {"q": torch.randn(4, 6), "k": torch.randn(2, 6), "o": torch.randn(6, 4), "norm": torch.randn(6)}

    def entries(tp):
        qk = ParamEntry("qk", (6 // tp, 6), "float32", fused_from=("q", "k"), num_shards=2, shard_dim=0)
        return (qk, ParamEntry("o", (6, 4 // tp), "float32", shard_dim=1), ParamEntry("norm", (6,), "float32"))

    def engine(tp, rank):
        table = EngineTable(entries=entries(tp), tp=tp, engine_rank=rank)
        return start_engine({e.name: torch.zeros(e.shape) for e in table.entries}, table=table)

    whole, left, right = engine(1, 0), engine(2, 0), engine(2, 1)
    report = pusher_for(whole, left, right).push(weights.items(), 1)
    assert set(report.engines.values()) == {"serving"}
    assert torch.equal(whole.parameters["qk"], torch.cat([weights["q"], weights["k"]]))
    for rank, half in enumerate((left, right)):
        rows = [weights["q"].chunk(2)[rank], weights["k"].chunk(2)[rank]]
        assert torch.equal(half.parameters["qk"], torch.cat(rows))
        assert torch.equal(half.parameters["o"], weights["o"].chunk(2, dim=1)[rank])
        assert torch.equal(half.parameters["norm"], weights["norm"])


def test_tied_weights_are_offered_once(start_engine, pusher_for):
    embed = torch.zeros(8, 4)
    engine = start_engine({"embed": embed}, aliases={"head": "embed"})
    pusher = pusher_for(engine)
    with pytest.raises(PlanError, match="head shares its storage with embed"):
        pusher.push([("embed", torch.ones(8, 4)), ("head", torch.ones(8, 4))], 1)
    pusher_for(engine, run_id="again").push([("embed", torch.ones(8, 4))], 1)
    assert torch.equal(embed, torch.ones(8, 4))


def test_flush_that_lies_is_detected(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    assert ask(engine.url, "/generate", {})[0] == 200
    engine.host.lying_flush = True
    with pytest.raises(NoEngineLeft, match="4 tokens computed before version 1 are still cached"):
        pusher_for(engine).push(tiny_weights.items(), 1)
    assert ask(engine.url, "/generate", {})[0] == 503


def test_two_syncs_concurrent_refused(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine)
    entered, go_on = threading.Event(), threading.Event()

    def slow():
        for item in tiny_weights.items():
            entered.set()
            go_on.wait(10)
            yield item

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pusher.push, slow(), 1)
        entered.wait(10)
        with pytest.raises(SyncBusyError, match="a weight sync is running"):
            pusher.push(tiny_weights.items(), 2)
        go_on.set()
        assert running.result().version == 1
    assert status(engine)["weight_version"] == "1"


def test_versions_only_rise(start_engine, pusher_for, tiny_weights):
    pusher = pusher_for(start_engine(zeros_like(tiny_weights)))
    pusher.push(tiny_weights.items(), 5)
    for version in (5, 4):
        with pytest.raises(SyncError, match=f"version {version} is not above 5"):
            pusher.push(tiny_weights.items(), version)


def test_response_version_equals_weights(start_engine, pusher_for):
    """Every weight is the version itself, so a response shows which weights it was computed with."""
    weights = {"w": torch.zeros(64)}
    engine = start_engine(zeros_like(weights))
    pusher = pusher_for(engine)
    wrong, seen, stop = [], set(), threading.Event()

    def client():
        while not stop.is_set():
            reply = ask(engine.url, "/generate", {})[1]
            seen.add(reply["weight_version"])
            if float(reply["weight_version"]) != reply["value"]:
                wrong.append(reply)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client) for _ in range(2)]
        for version in range(1, 11):
            engine.host.cached = 0
            pusher.push([("w", torch.full((64,), float(version)))], version)
            time.sleep(0.02)
        stop.set()
        for each in clients:
            each.result()
    assert not wrong
    assert len(seen) >= 5


def test_sampled_checksums_travel_only_when_due(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine, config=SyncConfig(checksum="sampled"))
    flags = [pusher.push(tiny_weights.items(), version).checksummed for version in range(1, 5)]
    assert flags == [True, True, False, False]
    digests = [body["bucket"]["digest"] for path, body in engine.seen if path == "/update_weights_from_tensor"]
    assert [d is not None for d in digests] == flags


def test_handles_are_closed_on_both_sides_over_50_syncs(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine)
    pusher.push(tiny_weights.items(), 1)

    def held():
        files = len(os.listdir("/proc/self/fd"))
        with open("/proc/self/maps", encoding="ascii") as maps:
            return files, sum("miles-weights" in line for line in maps)

    before = held()
    for version in range(2, 52):
        pusher.push(tiny_weights.items(), version)
    assert held() == before
    assert status(engine)["open_handles"] == 0
    pusher.close()
    assert held()[1] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "updating"),
        ("weight_version", "2"),
        ("run_id", "another run"),
        ("plan_digest", "another plan"),
        ("engine_epoch", "another life"),
    ],
)
@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_an_engine_that_reports_something_else_after_the_update_has_failed(
    start_engine, pusher_for, tiny_weights, field, value, transport
):
    engine, good = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))

    def lie(path, reply):
        return {**reply, "weights": {**reply["weights"], field: value}} if path == "/end_weight_update" else reply

    engine.answer = lie
    pusher = pusher_for(engine, good, config=SyncConfig(transport=transport, timeout_s=5.0))
    report = pusher.push(tiny_weights.items(), 1)
    assert report.engines[good.url] == "serving"
    assert "read_back" in report.engines[engine.url]
    assert value in report.engines[engine.url]


@pytest.mark.parametrize(("field", "value"), [("digest", "0x1"), ("digest", None), ("sequence", 7)])
def test_a_bucket_acknowledged_as_something_else_fails_its_engine(start_engine, pusher_for, tiny_weights, field, value):
    engine, good = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
    engine.answer = lambda path, reply: {**reply, field: value} if path == "/update_weights_from_tensor" else reply
    report = pusher_for(engine, good).push(tiny_weights.items(), 1)
    assert report.engines[good.url] == "serving"
    assert "bad_ack" in report.engines[engine.url]


def test_the_sync_after_a_change_of_engines_is_checksummed(start_engine, pusher_for, tiny_weights):
    first, second = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(first, config=SyncConfig(checksum="sampled"))
    flags = [pusher.push(tiny_weights.items(), version).checksummed for version in range(1, 5)]
    pusher.set_engines([first.url, second.url])
    flags += [pusher.push(tiny_weights.items(), version).checksummed for version in range(5, 7)]
    pusher.set_engines([second.url])
    flags += [pusher.push(tiny_weights.items(), version).checksummed for version in range(7, 9)]
    assert flags == [True, True, False, False, True, False, True, False]


def test_the_messages_of_an_update_say_what_the_engine_was_asked_to_expect(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    report = pusher_for(engine, config=SyncConfig(bucket_bytes=1 << 16)).push(tiny_weights.items(), 3)
    begin, *loads, end = [body for _, body in engine.seen]
    assert (begin["weight_version"], begin["run_id"], begin["plan_digest"]) == ("3", "run", report.plan_digest)
    assert end["buckets"] == len(loads) == report.buckets > 1
    assert [body["bucket"]["sequence"] for body in loads] == list(range(len(loads)))
    assert {body["bucket"]["version"] for body in loads} == {"3"}


def test_other_weights_get_another_plan_and_the_same_ones_keep_theirs(start_engine, pusher_for):
    """A plan is made for the tensors that are offered: a weight map of another shape makes a new one."""
    engine = start_engine({"a": torch.zeros(4), "b": torch.zeros(6)})
    pusher = pusher_for(engine)
    whole = {"a": torch.arange(4.0), "b": torch.arange(6.0)}
    pusher.push(whole.items(), 1)
    plan = pusher._plan
    pusher.push(whole.items(), 2)
    assert pusher._plan is plan
    with pytest.raises(PlanError, match="b"):
        pusher.push([("a", torch.ones(4))], 3, weight_map={"a": SourceSpec((4,), "float32")})
    pusher.push(whole.items(), 4, weight_map={name: SourceSpec(tuple(w.shape), "float32") for name, w in whole.items()})
    assert pusher._plan is not plan
