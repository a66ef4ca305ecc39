"""Engines that die, hang, restart or join late; trainers that are killed; addresses where nobody answers."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from sync_engines import ask, same, status, zeros_like

from miles.sync.config import SyncConfig
from miles.sync.errors import NoEngineLeft, SyncOptionError
from miles.sync.session import WeightPusher
from miles_ci.declare import register_cpu_ci

register_cpu_ci(30, "stage-a-cpu", nightly=True)


def test_one_engine_dies_others_continue(start_engine, pusher_for, tiny_weights):
    first, second = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
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
    good, bad = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
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
    engine = start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(engine)
    pusher.push(tiny_weights.items(), 1)
    port = int(engine.url.rsplit(":", 1)[1])
    engine.stop()
    again = start_engine(zeros_like(tiny_weights), port=port)
    report = pusher.push(tiny_weights.items(), 2)
    assert report.engines == {again.url: "serving"}
    assert same(again.parameters, tiny_weights)
    assert status(again)["weight_version"] == "2"


def test_late_joiner_admitted_at_current_version(start_engine, pusher_for, tiny_weights):
    first, late = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
    pusher = pusher_for(first)
    pusher.push(tiny_weights.items(), 1)
    pusher.set_engines([first.url, late.url])
    assert status(late)["weight_version"] == "0"
    report = pusher.push(tiny_weights.items(), 2)
    assert report.engines == {first.url: "serving", late.url: "serving"}
    assert [status(engine)["weight_version"] for engine in (first, late)] == ["2", "2"]


def test_an_engine_left_over_from_another_run_does_not_pass_for_current(start_engine, pusher_for, tiny_weights):
    engine = start_engine(zeros_like(tiny_weights))
    first = pusher_for(engine, run_id="first").push(tiny_weights.items(), 3)
    second = pusher_for(engine, run_id="second").push(tiny_weights.items(), 3)
    assert first.plan_digest != second.plan_digest
    assert status(engine)["plan_digest"] == second.plan_digest
    assert status(engine)["run_id"] == "second"


KILLED = """
import os, signal, sys, time, urllib.request, orjson, torch
from miles.sync.config import SyncConfig
from miles.sync.session import WeightPusher
def weights():
    yield "a", torch.ones(3000)
    yield "b", torch.ones(3000)
    while orjson.loads(urllib.request.urlopen(sys.argv[1] + "/weight_status").read())["open_handles"] == 0:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
pusher = WeightPusher([sys.argv[1]], SyncConfig(bucket_bytes=4096, timeout_s=1.0), "killed")
from miles.sync.entry import SourceSpec
pusher.push(weights(), 7, weight_map={n: SourceSpec((3000,), "float32") for n in "abc"})
"""


def test_trainer_killed_mid_sync_leaves_a_dirty_engine_and_no_shared_memory(start_engine, pusher_for):
    engine = start_engine({name: torch.zeros(3000) for name in "abc"})
    process = subprocess.run([sys.executable, "-c", KILLED, engine.url], capture_output=True, timeout=60)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert engine.parameters["a"].sum() == 3000, "the kill came too early to prove anything"
    # The engine sees the dead trainer's connection close; the next trainer heals it.
    assert dirty_reason(engine).startswith("client_left")
    report = pusher_for(engine, run_id="next").push([(name, torch.full((3000,), 2.0)) for name in "abc"], 1)
    assert report.engines == {engine.url: "serving"}
    assert status(engine)["weight_version"] == "1"
    assert engine.parameters["c"].sum() == 6000
    assert not any("miles" in name for name in os.listdir("/dev/shm"))
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert sum("miles-weights" in line for line in maps) == 2, "only the living trainer's two buffers are mapped"


def dirty_reason(engine) -> str:
    """Why an engine is dirty, once it is."""
    deadline = time.monotonic() + 5
    while status(engine)["state"] != "dirty" and time.monotonic() < deadline:
        time.sleep(0.05)
    return status(engine)["reason"]


def test_an_engine_whose_trainer_died_refuses_requests(start_engine):
    engine = start_engine({name: torch.zeros(3000) for name in "abc"})
    subprocess.run([sys.executable, "-c", KILLED, engine.url], capture_output=True, timeout=60)
    assert dirty_reason(engine).startswith("client_left")
    state = status(engine)
    assert (state["state"], state["weight_version"], state["open_handles"]) == ("dirty", "0", 0)
    assert ask(engine.url, "/generate", {})[0] == 503


@pytest.mark.parametrize("name", ["rdt"])
def test_unsupported_transports_are_refused_by_name(start_engine, pusher_for, tiny_weights, name):
    engine = start_engine(zeros_like(tiny_weights))
    with pytest.raises(SyncOptionError, match=rf"sync\.transport={name} is not offered by this build .* use"):
        pusher_for(engine, config=SyncConfig(transport=name)).push(tiny_weights.items(), 1)
    assert not engine.seen


def test_no_engine_answers(pusher_for):
    pusher = WeightPusher(["http://127.0.0.1:9"], SyncConfig(timeout_s=0.5), "run")
    with pytest.raises(NoEngineLeft, match=r"http://127\.0\.0\.1:9: unreachable"):
        pusher.push([("w", torch.zeros(1))], 1)
    pusher.close()


def test_an_engine_that_hangs_is_left_behind_within_the_bound(start_engine, pusher_for, tiny_weights):
    engine, hanging = start_engine(zeros_like(tiny_weights)), start_engine(zeros_like(tiny_weights))
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
