"""The weight routes against clients that send nonsense, leave, or come at the wrong time."""

import asyncio
import http.client
import socket
import threading
import time
import urllib.parse

import orjson
import pytest
import torch
from sync_engines import ParameterHost, ask, status

from miles.rollout.engines.embedded.network_wait import Caller
from miles.rollout.engines.embedded.weight_service import WeightService
from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)


@pytest.fixture
def engine(start_engine):
    return start_engine({"w": torch.zeros(4), "v": torch.zeros(2, 2)})


BEGIN = {"schema": 1, "run_id": "run", "weight_version": "1", "selector": "all", "plan_digest": "plan",
         "pause": "retract", "timeout_s": 30.0}  # fmt: skip


def begin_body(engine, version=1, **changes):
    about = ask(engine.url, "/parameter_table")[1]
    engine_says = {"table_digest": about["tables"][0]["table_digest"], "engine_epoch": about["engine_epoch"]}
    return {**BEGIN, **engine_says, "weight_version": str(version), **changes}


def in_session(token, version=1, **more):
    return {"session": token, "plan_digest": "plan", "selector": "all", "weight_version": str(version), **more}


def unchanged(engine, before):
    after = status(engine)
    return after == before and not engine.host.paused


GROUP = {"group_name": "g", "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
         "backend": "gloo", "timeout_s": 0.5}  # fmt: skip
NO_SESSION = in_session("nobody", load_format="miles_bucket", bucket={}, handle={}, flush_cache=False)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("begin_weight_update", {"timeout_s": 1e300}, "timeout_s"),
        ("begin_weight_update", {"timeout_s": 100_000}, "timeout_s"),
        ("begin_weight_update", {"timeout_s": 0}, "timeout_s"),
        ("begin_weight_update", {"timeout_s": True}, "timeout_s"),
        ("begin_weight_update", {"weight_version": "9" * 5000}, "weight_version"),
        ("begin_weight_update", {"weight_version": 3}, "weight_version"),
        ("begin_weight_update", {"selector": []}, "selector"),
        ("begin_weight_update", {"selector": "some"}, "selector"),
        ("begin_weight_update", {"selector": ["x" * 300]}, "selector"),
        ("begin_weight_update", {"selector": [{}]}, "selector"),
        ("begin_weight_update", {"selector": ["m"] * 257}, "selector"),
        ("begin_weight_update", {"pause": "stop"}, "pause"),
        ("begin_weight_update", {"pause": []}, "pause"),
        ("begin_weight_update", {"schema": 2}, "schema"),
        ("begin_weight_update", {"run_id": "r" * 257}, "run_id"),
        ("begin_weight_update", {"run_id": None}, "run_id"),
        ("begin_weight_update", {"more": 1}, "more"),
        ("update_weights_from_tensor", {**NO_SESSION, "bucket": 1}, "bucket"),
        ("update_weights_from_tensor", {**NO_SESSION, "flush_cache": True}, "flush_cache"),
        ("update_weights_from_tensor", {**NO_SESSION, "load_format": "pickle"}, "load_format"),
        ("update_weights_from_disk", in_session("t", load_format="safetensors", model_path="here"), "model_path"),
        ("update_weights_from_disk", in_session("t", load_format="safetensors", model_path="/a\0b"), "model_path"),
        ("update_weights_from_disk", in_session("t", load_format="miles_delta", model_path="/a", deltas=[]), "deltas"),
        (
            "update_weights_from_disk",
            in_session("t", load_format="miles_delta", model_path="/a", base_version="0", deltas=[["/b", 0, "1"]]),
            "deltas[0].base",
        ),
        ("init_weights_update_group", {**GROUP, "timeout_s": 1e9}, "timeout_s"),
        ("init_weights_update_group", {**GROUP, "master_port": 70000}, "master_port"),
        ("init_weights_update_group", {**GROUP, "rank_offset": 2}, "rank_offset"),
        ("init_weights_update_group", {**GROUP, "world_size": 1}, "world_size"),
        ("init_weights_update_group", {**GROUP, "backend": "nccl"}, "backend"),
        ("destroy_weights_update_group", {}, "group_name"),
        ("end_weight_update", in_session("t", buckets=-1), "buckets"),
        ("abort_weight_update", {"session": "t", "reason": "x" * 3000}, "reason"),
    ],
)
def test_a_field_out_of_bounds_is_named_and_changes_nothing(engine, path, body, field):
    sent = begin_body(engine, **body) if path == "begin_weight_update" else body
    before = status(engine)
    code, reply = ask(engine.url, f"/{path}", sent)
    assert (code, reply["success"], reply["field"]) == (422, False, field)
    assert unchanged(engine, before)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("update_weights_from_tensor", NO_SESSION),
        ("update_weights_from_distributed", in_session("nobody", bucket={}, group_name="g")),
        ("update_weights_from_disk", in_session("nobody", load_format="safetensors", model_path="/nothing")),
        ("end_weight_update", in_session("nobody", buckets=0)),
        ("abort_weight_update", {"session": "nobody"}),
    ],
)
@pytest.mark.parametrize("during", [False, True])
def test_a_message_of_no_session_changes_nothing(engine, path, body, during):
    if during:
        assert ask(engine.url, "/begin_weight_update", begin_body(engine))[0] == 200
    before = status(engine)
    code, reply = ask(engine.url, f"/{path}", body)
    assert (code, reply["code"]) == (409, "no_session")
    assert status(engine) == before
    assert engine.host.paused == during


def test_a_begin_that_repeats_goes_back_or_does_not_fit_changes_nothing(engine, pusher_for):
    pusher_for(engine).push([("w", torch.ones(4)), ("v", torch.ones(2, 2))], 5)
    before = status(engine)
    wrong = [
        (begin_body(engine, 5), "version_going_back"),
        (begin_body(engine, 4), "version_going_back"),
        (begin_body(engine, 6, selector=["vision"]), "unknown_module"),
        (begin_body(engine, 6, table_digest="other"), "table_changed"),
        (begin_body(engine, 6, engine_epoch="other"), "table_changed"),
    ]
    for body, expected in wrong:
        code, reply = ask(engine.url, "/begin_weight_update", body)
        assert (code, reply["code"]) == (409, expected)
        assert unchanged(engine, before)
    token = ask(engine.url, "/begin_weight_update", begin_body(engine, 6))[1]["session"]
    during = status(engine)
    code, reply = ask(engine.url, "/begin_weight_update", begin_body(engine, 7))
    assert (code, reply["code"], reply["retry_after_s"] > 0) == (409, "busy", True)
    assert status(engine) == during
    assert ask(engine.url, "/abort_weight_update", {"session": token})[0] == 200


def test_a_host_that_cannot_pause_leaves_the_engine_as_it_was(engine, monkeypatch):
    body, before = begin_body(engine), status(engine)
    monkeypatch.setattr(engine.host, "begin_update", lambda *_: 1 / 0)
    code, reply = ask(engine.url, "/begin_weight_update", body)
    assert (code, reply["code"]) == (500, "internal")
    assert unchanged(engine, before)


def test_a_failure_inside_a_session_makes_the_engine_dirty_and_gives_up_its_pause(engine, monkeypatch):
    token = ask(engine.url, "/begin_weight_update", begin_body(engine))[1]["session"]
    monkeypatch.setattr(engine.service.receiver, "complete", lambda *_: 1 / 0)
    code, reply = ask(engine.url, "/end_weight_update", in_session(token, buckets=0))
    assert (code, reply["weights"]["state"]) == (500, "dirty")
    assert "ZeroDivisionError" in reply["message"]
    assert not engine.host.paused


def test_a_short_session_after_a_long_one_ends_at_its_own_deadline(engine):
    long = ask(engine.url, "/begin_weight_update", begin_body(engine, timeout_s=60.0))[1]["session"]
    assert ask(engine.url, "/abort_weight_update", {"session": long})[0] == 200
    assert ask(engine.url, "/begin_weight_update", begin_body(engine, timeout_s=0.3))[0] == 200
    wait_for(engine, "dirty")
    assert status(engine)["reason"].startswith("timeout: ")


def wait_for(engine, state, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while status(engine)["state"] != state:
        assert time.monotonic() < deadline, status(engine)
        time.sleep(0.01)


def connected(engine, path, body):
    """A POST on a connection of its own, left open."""
    parts = urllib.parse.urlsplit(engine.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request("POST", path, orjson.dumps(body), {"content-type": "application/json"})
    return connection


def test_an_update_ends_with_the_connection_that_began_it(engine):
    connection = connected(engine, "/begin_weight_update", begin_body(engine))
    assert connection.getresponse().read()
    assert status(engine)["state"] == "updating", "other clients' connections come and go"
    connection.close()
    wait_for(engine, "dirty")
    assert status(engine)["reason"].startswith("client_left: ")
    assert not engine.host.paused


def test_a_join_that_waits_holds_no_lock_once_its_client_left(engine):
    """A rendezvous that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        body = {**GROUP, "master_port": silent.getsockname()[1], "timeout_s": 2.0}
        connection = connected(engine, "/init_weights_update_group", body)
        time.sleep(0.3)
        code = []
        waiting = threading.Thread(target=lambda: code.append(ask(engine.url, "/parameter_digests")[0]))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "one message at a time"
        connection.close()
        waiting.join(1)
        assert code == [200]
        assert engine.service.waiting_for_nobody == 1
        assert status(engine)["state"] == "serving"
    nobody_waits(engine)


def nobody_waits(engine):
    """An abandoned wait ends at its own limit."""
    deadline = time.monotonic() + 10
    while engine.service.waiting_for_nobody:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_left_while_waiting_for_the_turn_begins_nothing(engine):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        joining = connected(
            engine, "/init_weights_update_group", {**GROUP, "master_port": silent.getsockname()[1], "timeout_s": 2.0}
        )
        time.sleep(0.3)
        waiting = connected(engine, "/begin_weight_update", begin_body(engine))
        time.sleep(0.2)
        waiting.close()
        time.sleep(0.2)
        joining.close()
        assert ask(engine.url, "/parameter_digests")[0] == 200
    assert status(engine)["state"] == "serving"
    assert not engine.host.paused
    nobody_waits(engine)


def test_another_clients_connection_ends_no_update_even_while_a_message_is_handled():
    async def scenario():
        host = ParameterHost({"w": torch.zeros(4)})
        service = WeightService(host)
        about = service.describe()
        body = {**BEGIN, "table_digest": about["tables"][0]["table_digest"], "engine_epoch": about["engine_epoch"]}
        code, _ = await service.handle("/begin_weight_update", orjson.dumps(body), Caller("own"))
        phases = [host.state.get().phase]
        for client in ("another", "own"):
            async with service._lock:
                service.connection_closed(client)
            await asyncio.sleep(0.1)
            phases.append(host.state.get().phase)
        await service.close()
        return code, phases

    assert asyncio.run(scenario()) == (200, ["updating", "updating", "dirty"])


def test_a_group_is_not_changed_during_an_update(engine):
    assert ask(engine.url, "/begin_weight_update", begin_body(engine))[0] == 200
    for path, body in (("init_weights_update_group", GROUP), ("destroy_weights_update_group", {"group_name": "g"})):
        code, reply = ask(engine.url, f"/{path}", body)
        assert (code, reply["code"], reply["weights"]["state"]) == (409, "illegal_transition", "updating")
        assert reply["weights"]["allowed"] == ["finish", "fail", "read_weights"]
