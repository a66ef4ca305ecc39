"""Whole pushes over real HTTP and shared memory into engines on their own sockets."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
import torch

from miles.data.weight_table import EngineTable, ParamEntry
from miles.sync.config import SyncConfig
from miles.sync.errors import (
    NoEngineLeft,
    PlanError,
    SourceError,
    SyncBusyError,
    SyncError,
    SyncOptionError,
)
from miles.sync.plan import SourceSpec
from miles.sync.session import WeightPusher

FAST = SyncConfig(timeout_s=5.0)


def zeros(weights, dtype=None):
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in weights.items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def ask(url, path, body=None):
    data = None if body is None else orjson.dumps(body)
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=10) as reply:
            return reply.status, orjson.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def status(engine):
    return ask(engine.url, "/weight_status")[1]


@pytest.fixture
def pusher_for():
    pushers = []

    def make(*engines, config=FAST, run_id="run"):
        pushers.append(WeightPusher([engine.url for engine in engines], config, run_id))
        return pushers[-1]

    yield make
    for pusher in pushers:
        pusher.close()


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_engine_equals_trainer_after_sync(start_engine, pusher_for, tiny_weights, bucket_bytes):
    engine = start_engine(zeros(tiny_weights))
    pusher = pusher_for(engine, config=SyncConfig(bucket_bytes=bucket_bytes))
    for version in (1, 2, 3):
        weights = {name: tensor + version for name, tensor in tiny_weights.items()}
        report = pusher.push(weights.items(), version)
        assert equal(engine.parameters, weights)
        assert report.engines == {engine.url: "serving"}
    assert report.nbytes >= sum(t.numel() * 4 for t in tiny_weights.values())
    assert (report.buckets > 5) == (bucket_bytes == 4096)
    state = status(engine)
    assert (state["state"], state["weight_version"], state["plan_digest"]) == ("serving", "3", report.plan_digest)
    assert engine.host.pauses == ["retract"] * 3
    assert not engine.host.paused


def test_the_destinations_dtype_decides(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights, torch.bfloat16))
    pusher_for(engine).push(tiny_weights.items(), 1)
    assert equal(engine.parameters, {name: tensor.bfloat16() for name, tensor in tiny_weights.items()})


def test_streamed_weights_need_no_list_when_the_weight_map_is_given(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
    alive = []

    def stream():
        for name, tensor in tiny_weights.items():
            alive.append(name)
            yield name, tensor.clone()

    weight_map = {name: SourceSpec(tuple(t.shape), "float32") for name, t in tiny_weights.items()}
    report = pusher_for(engine).push(stream(), 1, weight_map=weight_map)
    assert report.tensors == len(alive) == len(tiny_weights)
    assert equal(engine.parameters, tiny_weights)


def test_unknown_name_is_fatal_on_every_transport(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
    with pytest.raises(PlanError, match="stray has no destination"):
        pusher_for(engine).push([*tiny_weights.items(), ("stray", torch.zeros(2))], 1)
    assert status(engine)["weight_version"] == "0"
    assert not engine.seen, "the engine was touched although the plan was refused"


@pytest.mark.parametrize("where", ["byte", "name"])
def test_corrupt_byte_makes_dirty(start_engine, pusher_for, tiny_weights, where):
    engine = start_engine(zeros(tiny_weights))

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
    assert equal(engine.parameters, tiny_weights)


def test_non_finite_weights_are_never_served(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
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
    engine = start_engine(zeros(tiny_weights))
    pusher = pusher_for(engine)
    pusher.push(tiny_weights.items(), 1)
    with pytest.raises(SourceError, match=message):
        pusher.push(change(tiny_weights).items(), 2)
    assert status(engine)["state"] == "dirty"


def test_one_engine_dies_others_continue(start_engine, pusher_for, tiny_weights):
    first, second = start_engine(zeros(tiny_weights)), start_engine(zeros(tiny_weights))
    pusher = pusher_for(first, second)
    pusher.push(tiny_weights.items(), 1)
    second.stop()
    report = pusher.push(tiny_weights.items(), 2)
    assert report.failed == (second.url,)
    assert "unreachable" in report.engines[second.url]
    assert report.engines[first.url] == "serving"
    assert report.metrics()["sync/engines"] == 1
    report = pusher.push(tiny_weights.items(), 3)
    assert status(first)["weight_version"] == "3"
    first.stop()
    with pytest.raises(NoEngineLeft, match="no engine"):
        pusher.push(tiny_weights.items(), 4)


def test_an_engine_that_fails_mid_sync_is_dirty_and_the_other_serves(start_engine, pusher_for, tiny_weights):
    good, bad = start_engine(zeros(tiny_weights)), start_engine(zeros(tiny_weights))
    bad.intercept = lambda path, body: None if path == "/end_weight_update" else body
    report = pusher_for(good, bad, config=SyncConfig(timeout_s=0.5)).push(tiny_weights.items(), 1)
    assert report.failed == (bad.url,)
    assert status(good)["weight_version"] == "1"
    deadline = time.monotonic() + 5
    while status(bad)["state"] != "dirty" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert status(bad)["state"] == "dirty"
    assert status(bad)["weight_version"] == "0"


def test_restarted_engine_is_healed_by_the_next_sync_on_the_same_address(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
    pusher = pusher_for(engine)
    pusher.push(tiny_weights.items(), 1)
    port = int(engine.url.rsplit(":", 1)[1])
    engine.stop()
    again = start_engine(zeros(tiny_weights), port=port)
    report = pusher.push(tiny_weights.items(), 2)
    assert report.engines == {again.url: "serving"}
    assert equal(again.parameters, tiny_weights)
    assert status(again)["weight_version"] == "2"


def test_late_joiner_admitted_at_current_version(start_engine, pusher_for, tiny_weights):
    first, late = start_engine(zeros(tiny_weights)), start_engine(zeros(tiny_weights))
    pusher = pusher_for(first)
    pusher.push(tiny_weights.items(), 1)
    pusher.set_engines([first.url, late.url])
    assert status(late)["weight_version"] == "0"
    report = pusher.push(tiny_weights.items(), 2)
    assert report.engines == {first.url: "serving", late.url: "serving"}
    assert [status(engine)["weight_version"] for engine in (first, late)] == ["2", "2"]


def test_an_engine_left_over_from_another_run_does_not_pass_for_current(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
    first = pusher_for(engine, run_id="first").push(tiny_weights.items(), 3)
    second = pusher_for(engine, run_id="second").push(tiny_weights.items(), 3)
    assert first.plan_digest != second.plan_digest
    assert status(engine)["plan_digest"] == second.plan_digest
    assert status(engine)["run_id"] == "second"


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
    engine = start_engine(zeros(tiny_weights))
    assert ask(engine.url, "/generate", {})[0] == 200
    engine.host.lying_flush = True
    with pytest.raises(NoEngineLeft, match="4 tokens computed before version 1 are still cached"):
        pusher_for(engine).push(tiny_weights.items(), 1)
    assert ask(engine.url, "/generate", {})[0] == 503


def test_two_syncs_concurrent_refused(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
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
    pusher = pusher_for(start_engine(zeros(tiny_weights)))
    pusher.push(tiny_weights.items(), 5)
    for version in (5, 4):
        with pytest.raises(SyncError, match=f"version {version} is not above 5"):
            pusher.push(tiny_weights.items(), version)


def test_response_version_equals_weights(start_engine, pusher_for):
    """Every weight is the version itself, so a response shows which weights it was computed with."""
    weights = {"w": torch.zeros(64)}
    engine = start_engine(zeros(weights))
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
    engine = start_engine(zeros(tiny_weights))
    pusher = pusher_for(engine, config=SyncConfig(checksum="sampled"))
    flags = [pusher.push(tiny_weights.items(), version).checksummed for version in range(1, 5)]
    assert flags == [True, True, False, False]
    digests = [body["bucket"]["digest"] for path, body in engine.seen if path == "/update_weights_from_tensor"]
    assert [d is not None for d in digests] == flags


def test_handles_are_closed_on_both_sides_over_50_syncs(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros(tiny_weights))
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


KILLED = """
import os, signal, sys, torch
from miles.sync.config import SyncConfig
from miles.sync.session import WeightPusher
def weights():
    yield "a", torch.ones(3000)
    yield "b", torch.ones(3000)
    os.kill(os.getpid(), signal.SIGKILL)
pusher = WeightPusher([sys.argv[1]], SyncConfig(bucket_bytes=4096, timeout_s=1.0), "killed")
from miles.sync.plan import SourceSpec
pusher.push(weights(), 7, weight_map={n: SourceSpec((3000,), "float32") for n in "abc"})
"""


def test_trainer_killed_mid_sync_leaves_a_dirty_engine_and_no_shared_memory(start_engine, pusher_for):
    engine = start_engine({name: torch.zeros(3000) for name in "abc"})
    before = set(os.listdir("/dev/shm"))
    process = subprocess.run([sys.executable, "-c", KILLED, engine.url], capture_output=True, timeout=60)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert engine.parameters["a"].sum() == 3000, "the kill came too early to prove anything"
    assert status(engine)["state"] == "updating"
    # The next trainer waits for the dead one's session to time out, then heals the engine.
    report = pusher_for(engine, run_id="next").push([(name, torch.full((3000,), 2.0)) for name in "abc"], 1)
    assert report.engines == {engine.url: "serving"}
    assert status(engine)["weight_version"] == "1"
    assert engine.parameters["c"].sum() == 6000
    assert set(os.listdir("/dev/shm")) <= before


def test_silence_of_a_dead_trainer_makes_the_engine_refuse(start_engine):
    engine = start_engine({name: torch.zeros(3000) for name in "abc"})
    subprocess.run([sys.executable, "-c", KILLED, engine.url], capture_output=True, timeout=60)
    deadline = time.monotonic() + 5
    while status(engine)["state"] != "dirty" and time.monotonic() < deadline:
        time.sleep(0.05)
    state = status(engine)
    assert (state["state"], state["weight_version"], state["open_handles"]) == ("dirty", "0", 0)
    assert "timeout" in state["reason"]
    assert ask(engine.url, "/generate", {})[0] == 503


@pytest.mark.parametrize("name", ["rdt"])
def test_unsupported_transports_are_refused_by_name(start_engine, pusher_for, tiny_weights, name):
    engine = start_engine(zeros(tiny_weights))
    with pytest.raises(SyncOptionError, match=rf"sync\.transport={name} is not offered by this build; use"):
        pusher_for(engine, config=SyncConfig(transport=name)).push(tiny_weights.items(), 1)
    assert not engine.seen


def test_no_engine_answers(pusher_for):
    pusher = WeightPusher(["http://127.0.0.1:9"], SyncConfig(timeout_s=0.5), "run")
    with pytest.raises(NoEngineLeft, match=r"http://127\.0\.0\.1:9: unreachable"):
        pusher.push([("w", torch.zeros(1))], 1)
    pusher.close()


def test_an_engine_that_hangs_is_left_behind_within_the_bound(start_engine, pusher_for, tiny_weights):
    engine, hanging = start_engine(zeros(tiny_weights)), start_engine(zeros(tiny_weights))
    release = threading.Event()

    def hang(path, body):
        if path == "/update_weights_from_tensor":
            release.wait(10)
        return body

    hanging.intercept = hang
    started = time.monotonic()
    report = pusher_for(engine, hanging, config=SyncConfig(timeout_s=0.5)).push(tiny_weights.items(), 1)
    release.set()
    assert time.monotonic() - started < 4
    assert report.failed == (hanging.url,)
    assert report.engines[engine.url] == "serving"
