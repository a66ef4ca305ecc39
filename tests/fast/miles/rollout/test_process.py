"""The engine as a process: how it starts, what it says when it cannot, and that it never outlives its parent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from miles.config import ConfigError
from miles.rollout.access import headers
from miles.rollout.config import EngineConfig
from miles.rollout.engines.embedded import launch, start
from miles.rollout.errors import EngineModelError, EngineStartError
from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)

SMALL = EngineConfig(max_running=8, max_total_tokens=1024)


def gone(pid, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_kill_ends_the_process_and_may_be_called_twice(tiny_model):
    with launch(SMALL, tiny_model, weight_version=12) as handle:
        assert psutil.pid_exists(handle.pid)
        assert httpx.get(handle.url + "/model_info", headers=headers(handle.token)).json()["weight_version"] == "12"
        handle.kill()
        assert gone(handle.pid)
        assert not psutil.pid_exists(handle.pid)
        handle.kill()


def test_kill_does_not_wait_for_requests_that_run(tiny_model):
    with launch(EngineConfig(max_running=8, max_total_tokens=1024), tiny_model) as handle:
        httpx.post(handle.url + "/pause_generation", json={"mode": "in_place"}, headers=headers(handle.token))
        body = {"input_ids": [2, 3], "sampling_params": {"max_new_tokens": 4}}
        with httpx.Client(timeout=30, headers=headers(handle.token)) as client, ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.post, handle.url + "/generate", json=body)
            time.sleep(0.2)
            started = time.monotonic()
            handle.kill()
            assert time.monotonic() - started < 2
            with pytest.raises(httpx.HTTPError):
                call.result()


def test_the_engine_ends_when_its_parent_is_killed(tiny_model):
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from miles.rollout.config import EngineConfig\n"
        "from miles.rollout.engines.embedded import launch\n"
        "h = launch(EngineConfig(max_running=8, max_total_tokens=1024), Path(sys.argv[1]))\n"
        "print(h.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tiny_model)], stdout=subprocess.PIPE, text=True)
    engine = int(parent.stdout.readline())
    assert not gone(engine, timeout_s=0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(engine)


def broken(kind, folder, tiny_model):
    target = folder / kind
    if kind == "missing":
        return target
    shutil.copytree(tiny_model, target)
    weights = target / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "no_weights":
        weights.unlink()
    else:
        config = json.loads((target / "config.json").read_text())
        config.update(
            {
                "family": {"model_type": "gpt2"},
                "shape": {"hidden_size": 32},
                "rope": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            }[kind]
        )
        (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("missing", "config.json"),
        ("truncated", "truncated"),
        ("no_weights", r"neither model\.safetensors nor"),
        ("family", "gpt2"),
        ("shape", "expected shape"),
        ("rope", "yarn"),
    ],
)
def test_a_bad_model_folder_is_a_config_error_that_names_it(tmp_path, tiny_model, kind, named):
    # The same code as in the process, called here to save the start-up.
    from miles.rollout.engines.embedded.__main__ import _build

    with pytest.raises(EngineModelError, match=named) as raised:
        _build(SMALL, broken(kind, tmp_path, tiny_model), 0)
    assert isinstance(raised.value, ConfigError)
    assert raised.value.exit_code == 2


def test_errors_of_the_process_reach_the_caller(tmp_path):
    with pytest.raises(EngineModelError, match=r"config\.json") as raised:
        launch(SMALL, tmp_path / "nothing")
    assert raised.value.exit_code == 2


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=f"engine.port {port}"):
            launch(EngineConfig(port=port), tmp_path)


def test_an_engine_that_is_not_ready_in_time_is_killed(tiny_model, tmp_path):
    starting = start(SMALL, tiny_model, log_path=tmp_path / "engine.log")
    with pytest.raises(EngineStartError, match=r"not ready after 0\.05 s"):
        starting.wait_ready(0.05)
    assert gone(starting._process.pid)


def test_a_process_that_dies_at_start_leaves_its_log_in_the_message(tmp_path):
    from miles.rollout.engines.process import StartingEngine

    log = tmp_path / "engine.log"
    command = [sys.executable, "-c", "import sys; sys.exit('no such device')"]
    with pytest.raises(EngineStartError, match="no such device"):
        StartingEngine(command, environment={}, log_path=log).wait_ready(20)
