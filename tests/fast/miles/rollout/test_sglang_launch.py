"""Starting SGLang: its command line, the supervisor's life and death, with a stand-in package named sglang."""

from __future__ import annotations

import asyncio
import os
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from miles.config import ConfigError
from miles.rollout.config import EngineConfig
from miles.rollout.engine import EngineClient
from miles.rollout.engines.sglang.arguments import server_arguments, server_environment
from miles.rollout.engines.sglang.interpreter import NEEDED_ROUTES, check_interpreter
from miles.rollout.engines.sglang.launch import launch
from miles.rollout.errors import EngineModelError, EngineStartError

STAND_IN = """
import argparse, json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
parser = argparse.ArgumentParser()
for name in ("model-path", "host", "port", "nccl-port", "dist-init-addr", "weight-version", "device", "dtype",
             "max-running-requests", "max-total-tokens", "chunked-prefill-size", "mem-fraction-static",
             "custom-weight-loader", "attention-backend", "sampling-backend", "grammar-backend"):
    parser.add_argument("--" + name)
for name in ("skip-tokenizer-init", "skip-server-warmup", "disable-cuda-graph", "disable-overlap-schedule"):
    parser.add_argument("--" + name, action="store_true")
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


def write_routes(package, routes):
    """A server's source with these routes, as its build is asked for them."""
    (package / "srt" / "entrypoints").mkdir(parents=True, exist_ok=True)
    lines = [f"@app.post({route!r})\nasync def route{at}(): ...\n" for at, route in enumerate(routes)]
    (package / "srt" / "entrypoints" / "http_server.py").write_text("".join(lines))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(STAND_IN))
    write_routes(package, NEEDED_ROUTES)
    root = Path(__file__).parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{root}")
    return package


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


def test_without_the_package_or_the_model_the_message_says_what_to_do(stand_in, model, tmp_path, monkeypatch):
    from miles.rollout.engines.sglang import __main__ as supervisor

    with pytest.raises(EngineModelError, match=r"config\.json"):
        supervisor.start_server(CONFIG, tmp_path / "nothing", 0)
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ConfigError, match=r"not installed in .*engine=embedded"):
        supervisor.start_server(CONFIG, model, 0)


def test_a_build_with_every_route_passes_and_says_its_version(stand_in):
    build = check_interpreter(CONFIG)
    assert build.version == "unknown"
    assert build.routes == set(NEEDED_ROUTES)


@pytest.mark.parametrize("route", NEEDED_ROUTES)
def test_a_build_that_lacks_a_route_is_refused_in_one_line(stand_in, route):
    write_routes(stand_in, [other for other in NEEDED_ROUTES if other != route])
    with pytest.raises(ConfigError, match=f"has no route {route};") as raised:
        check_interpreter(CONFIG)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "No such file"),
        ("#!/bin/sh\necho broken pipe dream >&2; exit 3\n", "broken pipe dream"),
        ("#!/bin/sh\necho 7\n", "it answered '7"),
        ("#!/bin/sh\necho nothing\n", "exit code 0"),
    ],
)
def test_a_wrong_interpreter_is_refused_in_one_line(tmp_path, script, said):
    python = tmp_path / "python"
    if script is not None:
        python.write_text(script)
        python.chmod(0o755)
    with pytest.raises(ConfigError, match=said) as raised:
        check_interpreter(EngineConfig(engine="sglang", python=str(python)))
    assert str(python) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_cpu_preset_may_be_overruled(model):
    line = " ".join(server_arguments(CONFIG, model, [1, 2, 3], weight_version=0))
    assert "--attention-backend torch_native" in line
    other = EngineConfig(engine="sglang", server_args={"attention_backend": "intel_amx"})
    line = " ".join(server_arguments(other, model, [1, 2, 3], weight_version=0))
    assert "--attention-backend intel_amx" in line
    assert "torch_native" not in line
    on_gpu = EngineConfig(engine="sglang", device="cuda")
    assert "--attention-backend" not in " ".join(server_arguments(on_gpu, model, [1, 2, 3], weight_version=0))


def test_the_servers_environment_has_nothing_of_our_interpreters_paths():
    outer = {"PYTHONPATH": "/ours", "HOME": "/h"}
    own = server_environment(EngineConfig(engine="sglang", python="/e/python", env={"A": "1"}), outer)
    assert own["PYTHONPATH"].endswith("/plugin")
    assert (own["A"], own["HOME"], own["SGLANG_USE_CPU_ENGINE"]) == ("1", "/h", "1")
    assert server_environment(EngineConfig(engine="sglang"), outer)["PYTHONPATH"].endswith("/plugin:/ours")
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(EngineConfig(engine="sglang", device="cuda"), outer)


@pytest.mark.parametrize("options", [{"python": "/x"}, {"env": {"A": "1"}}, {"server_args": {"a": 1}}])
def test_options_of_sglang_are_refused_for_the_embedded_engine(options):
    with pytest.raises(ValueError, match=f"engine.{next(iter(options))} is for engine.engine=sglang"):
        EngineConfig(**options)


def test_the_path_of_python_packages_is_ours():
    with pytest.raises(ValueError, match=r"engine\.env\.PYTHONPATH"):
        EngineConfig(engine="sglang", env={"PYTHONPATH": "/x"})
