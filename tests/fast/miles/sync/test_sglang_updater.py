"""Updates of an SGLang server: the order of its routes, our loader inside it, and what a failure leaves behind.

The server here has SGLang's routes and forms of replies as recorded from 0.5.23, and runs the real loader on a model
class with SGLang's own traits: fused parameters, an embedding padded beyond the vocabulary, unknown names skipped.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from miles.sync.config import SyncConfig
from miles.sync.errors import NoEngineLeft
from miles.sync.session import WeightPusher
from miles.weight_wire.server_loader import load

ROUTES = [
    "/update_weights_from_tensor", "/update_weight_version", "/flush_cache", "/pause_generation",
    "/begin_weight_update", "/end_weight_update",
]  # fmt: skip
ORDER = [
    "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_tensor",
    "/end_weight_update", "/flush_cache", "/update_weight_version", "/continue_generation",
]  # fmt: skip


class Embedding:
    org_vocab_size = 5

    def weight_loader(self, parameter, weight):
        parameter.data[: weight.shape[0]].copy_(weight)
        parameter.data[weight.shape[0] :] = 0


def fused_loader(parameter, weight, shard):
    parameter.data.view(2, -1, parameter.shape[1])[shard].copy_(weight)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, 4))
        self.embed.weight_loader = Embedding().weight_loader
        self.gate_up = torch.nn.Parameter(torch.zeros(6, 4))
        self.gate_up.weight_loader = fused_loader
        self.norm = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, weight in weights:
            if name in ("gate", "up"):
                own["gate_up"].weight_loader(own["gate_up"], weight, int(name == "up"))
            elif name in own:
                loader = getattr(own[name], "weight_loader", lambda p, w: p.data.copy_(w))
                loader(own[name], weight)


class Server:
    """What a test changes: `info`, `routes`, `fail` (route -> reply), `busy` (refused flushes)."""

    def __init__(self):
        self.model, self.calls, self.version = Model(), [], "0"
        self.info = {"version": "0.5.23", "random_seed": 7, "dtype": "float32", "tp_size": 1, "quantization": None}
        self.routes, self.fail, self.busy = list(ROUTES), {}, 0
        self.session = False
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def stop(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def get(self, path):
        paths = {route: {} for route in self.routes}
        return {
            "/server_info": self.info,
            "/openapi.json": {"paths": paths},
            "/model_info": {"weight_version": self.version},
        }[path]

    def post(self, path, body):
        self.calls.append((path, body))
        if path in self.fail:
            return self.fail[path]
        if path not in [*self.routes, "/continue_generation"]:
            return 404, {"detail": "Not Found"}
        if path == "/begin_weight_update":
            if self.session:
                return 400, {"success": False, "message": "a weight-update session is already open"}
            self.session = True
        elif path == "/end_weight_update":
            self.session = False
        elif path == "/flush_cache" and self.busy:
            self.busy -= 1
            return 400, None
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/update_weights_from_tensor":
            assert set(body) == {"serialized_named_tensors", "load_format", "flush_cache"}
            assert body["flush_cache"] is False
            (text,) = body["serialized_named_tensors"]
            load(self.model, pickle.loads(base64.b64decode(text)))
        return 200, {"success": True}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def do_GET(self):
        self._answer(200, self.server_state.get(self.path))

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(*self.server_state.post(self.path, json.loads(raw) if raw else None))

    def _answer(self, status, value):
        # /flush_cache answers in words.
        data = b"Cache flushed." if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    state = Server()
    yield state
    state.stop()


@pytest.fixture
def push(server):
    pushers = []

    def go(weights, version, *, pusher=None, **options):
        if pusher is None:
            config = SyncConfig(timeout_s=5.0, **options)
            pusher = WeightPusher([server.url], config, f"run {len(pushers)}", engine="sglang")
            pushers.append(pusher)
        return pusher.push(list(weights.items()), version), pusher

    yield go
    for pusher in pushers:
        pusher.close()


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {"embed": torch.randn(5, 4), "gate": torch.randn(3, 4), "up": torch.randn(3, 4), "norm": torch.randn(4)}


def routes(server):
    return [path for path, _ in server.calls]


def test_an_update_goes_in_this_order_and_every_value_arrives(server, push, weights):
    report, pusher = push(weights, 1)
    assert report.engines == {server.url: "serving"}
    assert routes(server) == ORDER
    by_route = dict(server.calls)
    assert by_route["/pause_generation"] == {"mode": "retract"}
    assert by_route["/update_weight_version"] == {"new_version": "1", "abort_all_requests": False}
    model = server.model
    assert torch.equal(model.embed.data[:5], weights["embed"])
    assert torch.equal(model.gate_up.data, torch.cat([weights["gate"], weights["up"]]))
    assert torch.equal(model.norm.data, weights["norm"])
    assert not hasattr(model.norm, "weight_loader")
    push({name: value + 1 for name, value in weights.items()}, 2, pusher=pusher)
    assert torch.equal(model.norm.data, weights["norm"] + 1)
    assert server.version == "2"


def test_a_build_without_sessions_gets_none(server, push, weights):
    server.routes = [route for route in ROUTES if "weight_update" not in route]
    push(weights, 1)
    assert routes(server) == [route for route in ORDER if "weight_update" not in route]


def test_a_busy_flush_is_asked_again(server, push, weights):
    server.busy = 2
    push(weights, 1)
    assert routes(server).count("/flush_cache") == 3


def test_the_trainers_dtype_becomes_the_servers(server, push, weights):
    server.info["dtype"] = "bfloat16"
    server.model.to(torch.bfloat16)
    push(weights, 1)
    assert torch.equal(server.model.norm.data, weights["norm"].bfloat16())


@pytest.mark.parametrize(
    ("drop", "add", "said"),
    [
        ("up", {}, r"gate_up 12 of 24"),
        ("norm", {}, r"norm 0 of 4"),
        (None, {"rope.inv_freq": torch.ones(2)}, r"rope\.inv_freq has no destination"),
    ],
)
def test_what_does_not_fill_the_model_exactly_is_refused_and_never_served(server, push, weights, drop, add, said):
    offered = {name: value for name, value in {**weights, **add}.items() if name != drop}
    with pytest.raises(NoEngineLeft, match=said):
        push(offered, 1)
    assert "/continue_generation" not in routes(server)
    assert server.version == "0"
    push(weights, 2)
    assert server.version == "2"
    assert routes(server)[-1] == "/continue_generation"


def test_bytes_that_changed_on_the_way_are_noticed(server, push, weights, monkeypatch):
    from miles.sync import bucket

    honest = bucket.bucket_digest
    monkeypatch.setattr(bucket, "bucket_digest", lambda buffer, nbytes: honest(buffer, nbytes) ^ 1)
    with pytest.raises(NoEngineLeft, match=r"bucket 0: digest 0x\w+, announced was"):
        push(weights, 1)
    assert "/continue_generation" not in routes(server)


@pytest.mark.parametrize("sequence", [2, 3])
def test_a_bucket_out_of_its_turn_is_noticed_where_it_comes(server, push, weights, monkeypatch, sequence):
    honest = load

    def one_too_many(model, named):
        honest(model, named)
        ((name, raw),) = named
        message = json.loads(bytes(raw.tolist()))
        if message["kind"] == "bucket":
            message["bucket"]["sequence"] = sequence
            honest(model, [(name, torch.tensor(list(json.dumps(message).encode()), dtype=torch.uint8))])

    monkeypatch.setitem(Server.post.__globals__, "load", one_too_many)
    with pytest.raises(NoEngineLeft, match=f"bucket {sequence} came where 1 was due"):
        push(weights, 1)
    assert "/continue_generation" not in routes(server)


@pytest.mark.parametrize(
    ("route", "reply", "said"),
    [
        ("/update_weights_from_tensor", (200, {"success": False, "message": "no room"}), "no room"),
        ("/update_weights_from_tensor", (200, {"success": True}), "left no answer"),
        ("/begin_weight_update", (400, {"success": False, "message": "packed"}), "packed"),
        ("/end_weight_update", (400, {"success": False, "message": "not post-processed"}), "not post-processed"),
        ("/update_weight_version", (200, {"success": True}), "reports version '0', expected 1"),
        ("/pause_generation", (500, {"detail": "x"}), "http_500"),
    ],
)
def test_a_route_that_fails_leaves_the_server_paused(server, push, weights, route, reply, said):
    server.fail[route] = reply
    with pytest.raises(NoEngineLeft, match=said):
        push(weights, 1)
    assert "/continue_generation" not in routes(server)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"tp_size": 2}, "tp_size is 2"),
        ({"quantization": "fp8"}, "quantization is fp8"),
        ({"dtype": "auto"}, "dtype 'auto'"),
    ],
)
def test_servers_that_cannot_be_updated_are_refused_before_they_are_paused(server, push, weights, info, said):
    server.info |= info
    with pytest.raises(NoEngineLeft, match=said):
        push(weights, 1)
    assert server.calls == []


def test_a_build_without_a_needed_route_is_named(server, push, weights):
    server.routes.remove("/update_weight_version")
    with pytest.raises(NoEngineLeft, match=r"sglang 0\.5\.23 has no route /update_weight_version"):
        push(weights, 1)


def test_a_server_that_was_started_anew_gets_everything(server, push, weights):
    _, pusher = push(weights, 1)
    server.info = {**server.info, "random_seed": 8}
    server.model = Model()
    report, _ = push(weights, 2, pusher=pusher)
    assert report.engines == {server.url: "serving"}
    assert torch.equal(server.model.norm.data, weights["norm"])


def test_in_place_pauses_are_refused(server, push, weights):
    with pytest.raises(NoEngineLeft, match=r"sync\.pause=in_place"):
        push(weights, 1, pause="in_place")
    assert server.calls == []
