"""Starting SGLang: its command line, the supervisor's life and death, with a stand-in package named sglang."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from miles.config import ConfigError
from miles.rollout.config import EngineConfig
from miles.rollout.engine import EngineClient
from miles.rollout.engines.sglang.arguments import server_arguments
from miles.rollout.engines.sglang.launch import launch
from miles.rollout.errors import EngineModelError, EngineStartError

STAND_IN = """
import argparse, json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
parser = argparse.ArgumentParser()
for name in ("model-path", "host", "port", "nccl-port", "dist-init-addr", "weight-version", "device", "dtype",
             "max-running-requests", "max-total-tokens", "chunked-prefill-size", "mem-fraction-static"):
    parser.add_argument("--" + name)
parser.add_argument("--skip-tokenizer-init", action="store_true")
args = parser.parse_args()
if os.environ.get("STAND_IN_FAILS"):
    sys.exit("CUDA out of memory")
taken = os.environ.get("STAND_IN_TAKEN")
if taken and not os.path.exists(taken):
    open(taken, "w").close()
    sys.exit("OSError: [Errno 98] Address already in use")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"/server_info": {"version": "0.5.99", "pid": os.getpid()},
                "/openapi.json": {"paths": {"/generate": {}, "/pause_generation": {}}},
                "/model_info": {"weight_version": args.weight_version}}.get(self.path, {})
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *a): pass

HTTPServer((args.host, int(args.port)), Handler).serve_forever()
"""

CONFIG = EngineConfig(engine="sglang", start_timeout_s=20, server_args={"mem-fraction-static": 0.5})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(STAND_IN))
    root = Path(__file__).parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{root}")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it ends between open and read
        return False


def test_the_command_line_names_every_port_and_the_version(model):
    line = " ".join(server_arguments(CONFIG, model, [1, 2, 3], weight_version=7))
    for part in ("--port 1", "--nccl-port 2", "--dist-init-addr 127.0.0.1:3", "--weight-version 7", "--device cpu"):
        assert part in line
    assert "--mem-fraction-static 0.5" in line
    assert "--disable-radix-cache" not in line


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"port": 1}, r"server_args\.port"),
        ({"nccl_port": 1}, "nccl_port"),
        ({"x": [1]}, "list"),
        ({"api_key": "k"}, "everybody's"),
    ],
)
def test_reserved_and_ill_typed_server_arguments_are_refused(model, args, named):
    with pytest.raises(ConfigError, match=named):
        launch(EngineConfig(engine="sglang", server_args=args), model)


def test_the_server_is_found_probed_and_killed_with_its_supervisor(stand_in, model, tmp_path):
    async def probe(url):
        async with EngineClient(url, vocab_size=8) as client:
            return await client.info(), await client.weight_version()

    with launch(CONFIG, model, weight_version=3, log_path=tmp_path / "log") as handle:
        info, version = asyncio.run(probe(handle.url))
        assert (info.engine, info.version, version) == ("sglang", "0.5.99", 3)
        assert info.capabilities == {"generate", "batch_generate", "pause"}
        server = info.raw["pid"]
        assert alive(server)
    deadline = time.monotonic() + 5
    while alive(server):
        assert time.monotonic() < deadline, "the server outlived its supervisor"
        time.sleep(0.05)
    assert not alive(handle.pid)


def test_a_taken_port_is_retried_with_another(stand_in, model, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_TAKEN", str(tmp_path / "once"))
    with launch(CONFIG, model, log_path=tmp_path / "log") as handle:
        assert psutil.pid_exists(handle.pid)
    assert os.path.exists(tmp_path / "once")


def test_a_server_that_dies_at_start_is_quoted(stand_in, model, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(EngineStartError, match="CUDA out of memory"):
        launch(CONFIG, model, log_path=tmp_path / "log")


def test_without_the_package_or_the_model_the_message_says_what_to_do(model, tmp_path, monkeypatch):
    from miles.rollout.engines.sglang import __main__ as supervisor

    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineModelError, match="engine=embedded"):
        supervisor.start_server(CONFIG, model, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(EngineModelError, match=r"config\.json"):
        supervisor.start_server(CONFIG, tmp_path / "nothing", 0)
