"""The runner on a real device: health, lease, refusal of occupied memory, class of an out-of-memory failure.

The lease is the one this file itself was started with. The other runs start a second `miles-ci run` with lock files of
its own, on a repository in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from miles_ci.declare import register_cuda_ci
from miles_ci.run.devices import health, probe_child
from miles_ci.run.devices.inventory import host_devices, inherited, occupancy
from miles_ci.run.devices.slots import DEFAULT_FOLDER, LeaseManager, Request

register_cuda_ci(est_time=30, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["ci"])

ROOT = Path(__file__).resolve().parents[3]
SUITE = "stage-b-1-gpu-h200"
DECLARED = (
    "from miles_ci.declare import register_cuda_ci\n"
    f"register_cuda_ci(est_time=20, suite='{SUITE}', hardware=['h200'], num_gpus=1, labels=['ci'])\n"
)
OCCUPANT = """
import sys, torch
block = torch.empty(20 << 30, dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def mine():
    """The devices of this test, as the host knows them."""
    return inherited(host_devices("cuda"), "cuda")


def nested_run(folder: Path, source: str, *words: str) -> tuple[int, str, dict]:
    """`miles-ci run` of one file with leases of its own; (exit code, output, the file's result)."""
    target = folder / "tests" / "fast-gpu" / "test_inner.py"
    target.parent.mkdir(parents=True)
    target.write_text(DECLARED + textwrap.dedent(source))
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    per_run = ("MILES_CI_LEASE", "MILES_CI_PLAN", "MILES_CI_PLAN_DIGEST", "MILES_CI_HISTORY_URL")
    env = {name: value for name, value in os.environ.items() if name not in per_run}
    env["MILES_CI_LOCK_DIR"] = str(folder / "locks")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    registry = ["--root", str(folder), "--registry", str(ROOT / "registry.yaml")]
    command = [
        sys.executable,
        "-m",
        "miles_ci",
        "run",
        "--suite",
        SUITE,
        "--results",
        str(folder / "out"),
        *registry,
        *words,
    ]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    (path,) = (folder / "out").glob("*/results.json")
    (test,) = json.loads(path.read_text())["tests"]
    return done.returncode, output, test


def test_device_is_healthy_down_to_the_last_byte_of_256_mib(mine):
    state = health.check(mine, "cuda")
    assert state.ok, state.error
    assert state.driver_version >= 12000


def test_test_process_sees_exactly_the_leased_device(mine):
    import torch

    lease = json.loads(os.environ["MILES_CI_LEASE"])
    assert lease["backend"] == "cuda"
    assert [device.bus_id for device in mine] == lease["devices"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mine[0].uuid
    assert torch.cuda.device_count() == 1 == probe_child.visible_count("cuda")
    assert str(torch.cuda.get_device_properties(0).uuid) in mine[0].uuid
    assert "H200" in mine[0].name


def test_leased_device_cannot_be_leased_a_second_time(mine, tmp_path):
    folder = Path(os.environ.get("MILES_CI_LOCK_DIR") or DEFAULT_FOLDER)
    other = LeaseManager(folder, mine, tmp_parent=tmp_path)
    assert other.acquire_next([Request("intruder", 1, 1.0)]) is None
    other.close()


def test_occupied_memory_is_refused_with_the_name_of_its_user(mine, tmp_path):
    occupant = subprocess.Popen(
        [sys.executable, "-c", OCCUPANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert occupant.stdout.readline() == "holding\n"
        free, users = occupancy("cuda")[mine[0].bus_id]
        assert free <= mine[0].total_mib - (20 << 10)
        assert occupant.pid in {user.pid for user in users}
        code, output, test = nested_run(tmp_path, "def test_a(): assert True\n", "--wait-memory", "0")
        assert (code, test["outcome"]) == (3, "infra"), output
        assert test["message"].startswith("gpu-occupied")
        assert f"pid {occupant.pid}" in test["message"]
        # It is named, not killed.
        assert occupant.poll() is None
    finally:
        occupant.kill()
        occupant.communicate()
    assert health.wait_for_memory(mine, "cuda", wait_s=30) == ()


def test_out_of_memory_is_the_tests_own_failure_and_not_repeated(tmp_path):
    source = """
        def test_takes_too_much():
            import torch
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
            assert False
    """
    code, output, test = nested_run(tmp_path, source)
    assert (code, test["outcome"]) == (1, "failed"), output
    (attempt,) = test["attempts"]
    assert (attempt["cause"], attempt["cause_kind"]) == ("oom", "test")
    assert attempt["failures"][0]["type"].endswith("OutOfMemoryError")
