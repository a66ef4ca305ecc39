"""Health, counting and occupancy against a compiled stand-in for the drivers."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from miles_ci.run.devices import health, occupancy, probe, probe_child
from miles_ci.run.devices.inventory import Device, DeviceUser

BLOCK = 1 << 20
BACKENDS = ("cuda", "rocm")


def devices(count: int) -> list[Device]:
    return [Device(n, f"00000000:{n + 1:02x}:00.0", f"GPU-{n}", "stub", 143000) for n in range(count)]


def check(env: dict[str, str], backend: str = "cuda", count: int = 1, **options: float) -> health.Health:
    return health.check(devices(count), backend, environ=env, block_bytes=BLOCK, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sound_devices_pass_and_neighbours_copy(stub_env, backend):
    state = check(stub_env(devices=4), backend, 4)
    assert (state.ok, state.peer_copies) == (True, 3)
    assert state.driver_version > 0


def test_error_802_appears_only_when_a_context_is_made_and_is_named(stub_env):
    env = stub_env(fault="802")
    assert probe_child.visible_count("cuda", environ=env) == 1
    state = check(env)
    assert (state.ok, state.code) == (False, 802)
    assert "802" in state.error
    assert "system not yet initialized" in state.error


@pytest.mark.parametrize("backend", BACKENDS)
def test_hanging_driver_is_given_up_after_the_limit(stub_env, backend):
    started = time.monotonic()
    state = check(stub_env(fault="hang"), backend, limit_s=0.5)
    assert (state.ok, state.code) == (False, -4)
    assert "no answer from the driver within 0.5 s" in state.error
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_byte_read_back_is_found_and_placed(stub_env, backend):
    state = check(stub_env(fault="corrupt"), backend)
    assert (state.ok, state.code) == (False, -2)
    assert f"byte {BLOCK // 2} of {BLOCK}" in state.error


@pytest.mark.parametrize("backend", BACKENDS)
def test_peer_copy_that_does_not_arrive_is_found(stub_env, backend):
    assert check(stub_env(fault="peer", devices=1), backend).ok
    state = check(stub_env(fault="peer", devices=2), backend, 2)
    assert "peer 0 -> 1" in state.error


def test_allocation_failure_and_crash_are_unhealthy(stub_env):
    assert "out of memory" in check(stub_env(fault="alloc")).error
    assert check(stub_env(fault="crash")).code == -5


def test_fewer_visible_devices_than_leased_is_unhealthy(stub_env):
    env = stub_env(devices=2)
    answer = probe_child.ask("health", "cuda", str(BLOCK), environ={**env, "CUDA_VISIBLE_DEVICES": ""})
    assert answer["error"] == "no device is visible"


def test_machine_without_a_driver_says_so(tmp_path):
    state = check({"PATH": "/usr/bin", "LD_LIBRARY_PATH": str(tmp_path)})
    assert (state.ok, state.code) == (False, -1)
    assert "libcuda.so.1" in state.error


def test_count_follows_the_visibility_variables(stub_env):
    env = stub_env(devices=8)
    assert probe_child.visible_count("cuda", environ=env) == 8
    assert probe_child.visible_count("cuda", environ={**env, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == 2
    assert probe_child.visible_count("rocm", environ={**env, "HIP_VISIBLE_DEVICES": "3"}) == 1


def test_pattern_differs_between_pages_chunks_and_devices():
    first = probe.pattern(0, 0, 8192)
    assert first[:4096] != first[4096:]
    assert first != probe.pattern(0, 1, 8192)
    assert first != probe.pattern(1, 0, 8192)
    assert len(probe.pattern(0, 0, 5000)) == 5000


def test_occupancy_names_device_memory_and_user(stub_env):
    answer = probe_child.ask("occupancy", "cuda", environ=stub_env(devices=2, free_mib=1000, user=1))
    first, second = answer["devices"]
    assert (first["bus_id"], second["bus_id"]) == ("00000000:01:00.0", "00000000:02:00.0")
    assert (first["total_mib"], first["free_mib"]) == (143000, 1000)
    assert first["processes"][0]["pid"] == 1
    assert first["processes"][0]["mib"] == 4096
    assert first["processes"][0]["command"]


def test_amd_devices_are_read_from_the_driver_files(tmp_path: Path):
    for card, bus_id, used in (("card1", "0000:0c:00.0", 2048), ("card0", "0000:8a:00.0", 0)):
        device = tmp_path / "bus" / bus_id
        device.mkdir(parents=True)
        files = {"vendor": "0x1002", "mem_info_vram_total": str(196608 << 20), "mem_info_vram_used": str(used << 20)}
        for name, text in {**files, "unique_id": f"abc{card}", "product_name": "MI300X"}.items():
            (device / name).write_text(text + "\n")
        (tmp_path / "class" / "drm" / card).mkdir(parents=True)
        (tmp_path / "class" / "drm" / card / "device").symlink_to(device)
    node = tmp_path / "class/kfd/kfd/topology/nodes/2"
    node.mkdir(parents=True)
    (node / "properties").write_text(f"location_id {0x0C << 8}\ndomain 0\n")
    (node / "gpu_id").write_text("4242\n")
    process = tmp_path / "class/kfd/kfd/proc/1"
    process.mkdir(parents=True)
    (process / "vram_4242").write_text(str(2048 << 20))
    (process / "vram_9999").write_text(str(1 << 20))
    first, second = occupancy.amd_devices(tmp_path)
    assert (first["index"], first["bus_id"], first["uuid"]) == (0, "0000:0c:00.0", "GPU-abccard1")
    assert (first["total_mib"], first["free_mib"]) == (196608, 196608 - 2048)
    assert [(user["pid"], user["mib"]) for user in first["processes"]] == [(1, 2048)]
    assert second["processes"] == []


def wait(readings: list[int], **options: float) -> tuple[health.Occupied, ...]:
    device = devices(1)[0]
    user = DeviceUser(4711, 9000, "python other.py")

    def read(backend: str) -> dict[str, tuple[int, tuple[DeviceUser, ...]]]:
        free = readings.pop(0) if len(readings) > 1 else readings[0]
        return {device.bus_id: (free, (user,))}

    return health.wait_for_memory([device], "cuda", read=read, poll_s=0.01, **{"wait_s": 0.1, **options})


def test_device_must_be_almost_empty_whatever_the_test_asks_for():
    assert health.needed_mib(devices(1)[0], None) == int(143000 * 0.95)
    assert health.needed_mib(devices(1)[0], 1) == int(143000 * 0.95)
    assert health.needed_mib(devices(1)[0], 139) == 139 * 1024


def test_memory_that_becomes_free_in_time_is_waited_for():
    assert wait([1000, 1000, 143000], wait_s=5) == ()


def test_occupied_memory_names_pid_size_and_command():
    (occupied,) = wait([1000])
    assert "pid 4711, 9000 MiB, python other.py" in occupied.text()
    assert "has 1000 MiB free" in occupied.text()


def test_waiting_ends_at_once_when_the_run_is_cancelled():
    started = time.monotonic()
    assert wait([1000], wait_s=60, cancelled=lambda: True)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("import os, time\nif os.fork() == 0: time.sleep(60)\nprint('{}')", "no answer within 0.5 s"),
        ("while True: print('x' * 65536)", "bytes printed"),
        ("print('[' * 100000)", "no JSON object"),
        ("print('{}'); raise SystemExit(4)", "exit code 4"),
    ],
)
def test_a_command_of_the_project_is_bounded_in_time_and_size(tmp_path, script, said) -> None:
    limit = 0.5 if "0.5" in said else 30.0
    answer = probe_child.ask_command([sys.executable, "-c", script], cwd=tmp_path, limit_s=limit)
    assert answer["ok"] is False
    assert said in answer["error"]


def test_a_command_that_is_not_there_is_an_answer_and_no_exception(tmp_path) -> None:
    answer = probe_child.ask_command(["no-such-command-here"], cwd=tmp_path)
    assert answer == {"ok": False, "error": "no-such-command-here cannot be started: No such file or directory"}
