"""Leases among real processes: exclusive, all or nothing, given back by death, fair to large requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.errors import UsageError
from miles_ci.run.devices import slots
from miles_ci.run.devices.inventory import Device
from miles_ci.run.devices.locks import LeaseError
from miles_ci.run.devices.slots import LeaseManager, Request

DEVICES = tuple(Device(n, f"0000:{n:02x}:00.0", f"GPU-{n:08x}", "fake", 1000) for n in range(8))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def manager(folder: Path, clock: Clock | None = None, devices=DEVICES) -> LeaseManager:
    return LeaseManager(folder, devices, clock=clock or Clock(), tmp_parent=folder)


def test_two_managers_never_hold_the_same_device(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    one = first.acquire_next([Request("a", 5, 10)])[1]
    two = second.acquire_next([Request("b", 3, 10)])[1]
    assert not set(one.devices) & set(two.devices)
    assert second.acquire_next([Request("c", 1, 10)]) is None
    one.release()
    assert second.acquire_next([Request("c", 1, 10)]) is not None


def test_request_gets_all_its_devices_or_none(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    held = first.acquire_next([Request("a", 5, 10)])[1]
    assert second.acquire_next([Request("b", 4, 10)]) is None
    held.release()
    assert len(second.acquire_next([Request("b", 8, 10)])[1].devices) == 8


def test_ports_and_folders_of_leases_are_disjoint(tmp_path):
    leases = [manager(tmp_path).acquire_next([Request(str(n), 1, 1)])[1] for n in range(8)]
    assert len({lease.port_base for lease in leases}) == 8
    assert all(abs(a.port_base - b.port_base) >= slots.PORTS_PER_LEASE for a in leases for b in leases if a is not b)
    assert len({lease.tmpdir for lease in leases}) == 8
    folder = leases[0].tmpdir
    (folder / "file").write_text("x")
    leases[0].release()
    assert not folder.exists()


def test_pairs_and_quads_take_aligned_blocks(tmp_path):
    host = manager(tmp_path)
    host.acquire_next([Request("single", 1, 10)])
    pair = host.acquire_next([Request("pair", 2, 10)])[1]
    quad = host.acquire_next([Request("quad", 4, 10)])[1]
    assert [device.index for device in pair.devices] == [2, 3]
    assert [device.index for device in quad.devices] == [4, 5, 6, 7]


def test_backfill_starts_only_when_it_ends_before_the_reserved_start_of_the_head(tmp_path):
    clock = Clock()
    host = manager(tmp_path, clock)
    host.acquire_next([Request("running", 6, 100)])
    waiting = [Request("head", 8, 50), Request("too long", 1, 101), Request("fits", 1, 99)]
    place, lease = host.acquire_next(waiting)
    assert (place, lease.request.label) == (2, "fits")


def test_small_request_of_another_runner_does_not_starve_a_waiting_large_one(tmp_path):
    clock = Clock()
    large, small = manager(tmp_path, clock), manager(tmp_path, clock)
    running = small.acquire_next([Request("running", 1, 100)])[1]
    assert large.acquire_next([Request("large", 8, 50)]) is None
    clock.now += 10
    assert small.acquire_next([Request("long", 1, 500)]) is None
    short = small.acquire_next([Request("short", 1, 50)])[1]
    for lease in (running, short):
        lease.release()
    assert small.acquire_next([Request("long", 1, 500)]) is None
    assert large.acquire_next([Request("large", 8, 50)]) is not None


def test_request_beside_a_waiting_one_starts_when_enough_devices_remain_for_both(tmp_path):
    clock = Clock()
    first, second = manager(tmp_path, clock), manager(tmp_path, clock)
    held = first.acquire_next([Request("running", 6, 100)])[1]
    assert first.acquire_next([Request("waits", 4, 10)]) is None
    held.release()
    assert second.acquire_next([Request("other", 4, 10_000)]) is not None


def test_overdue_test_reserves_now_so_that_nothing_slips_in_front(tmp_path):
    clock = Clock()
    host = manager(tmp_path, clock)
    host.acquire_next([Request("running", 4, 10)])
    clock.now += 60
    assert host.acquire_next([Request("head", 8, 50), Request("small", 1, 1)]) is None


def test_ticket_of_a_dead_runner_holds_nobody_up(tmp_path):
    clock = Clock()
    other = manager(tmp_path, clock)
    held = other.acquire_next([Request("running", 1, 100)])[1]
    program = f"""
        import os
        from pathlib import Path
        from miles_ci.run.devices import slots
        from miles_ci.run.devices.inventory import Device
        devices = [Device(n, f"0000:{{n:02x}}:00.0", "GPU", "fake", 1) for n in range(8)]
        manager = slots.LeaseManager(Path({str(tmp_path)!r}), devices)
        assert manager.acquire_next([slots.Request("large", 8, 50)]) is None
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=_with_package())
    assert list((tmp_path / "waiting").iterdir())
    assert other.acquire_next([Request("long", 1, 500)]) is not None
    assert not list((tmp_path / "waiting").iterdir())
    held.release()


def test_devices_of_a_killed_runner_come_back(tmp_path):
    program = f"""
        import time
        from pathlib import Path
        from miles_ci.run.devices import slots
        from miles_ci.run.devices.inventory import Device
        devices = [Device(n, f"0000:{{n:02x}}:00.0", "GPU", "fake", 1) for n in range(8)]
        lease = slots.LeaseManager(Path({str(tmp_path)!r}), devices).acquire_next([slots.Request("all", 8, 50)])[1]
        print("held", flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=_with_package()
    )
    assert process.stdout.readline() == b"held\n"
    host = manager(tmp_path)
    assert host.acquire_next([Request("mine", 1, 1)]) is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert host.acquire(Request("mine", 8, 1), wait_s=5) is not None


def test_many_processes_fighting_for_devices_never_overlap(tmp_path):
    program = f"""
        import os, random, sys, time
        from pathlib import Path
        from miles_ci.run.devices import slots
        from miles_ci.run.devices.inventory import Device
        devices = [Device(n, f"0000:{{n:02x}}:00.0", "GPU", "fake", 1) for n in range(8)]
        manager = slots.LeaseManager(Path({str(tmp_path)!r}), devices, tmp_parent=Path({str(tmp_path)!r}))
        rng = random.Random(int(sys.argv[1]))
        for n in range(6):
            lease = manager.acquire(slots.Request("x", rng.choice([1, 2, 4, 8]), 0.01), poll_s=0.005)
            for device in lease.devices:
                fd = os.open(Path({str(tmp_path)!r}) / f"claim-{{device.index}}", os.O_CREAT | os.O_EXCL)
                os.close(fd)
            time.sleep(0.005)
            for device in lease.devices:
                os.unlink(Path({str(tmp_path)!r}) / f"claim-{{device.index}}")
            lease.release()
    """
    running = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(seed)], env=_with_package(), stderr=-1)
        for seed in range(4)
    ]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 50)), min_size=1, max_size=25))
def test_every_request_is_served_in_bounded_time(tmp_path_factory, jobs):
    """Simulated time: nothing starves, and no device is given twice."""
    clock = Clock()
    host = manager(tmp_path_factory.mktemp("locks"), clock)
    pending = sorted((Request(str(n), k, s) for n, (k, s) in enumerate(jobs)), key=lambda r: -r.count * r.estimate_s)
    running: list[tuple[float, slots.Lease]] = []
    area = sum(request.count * request.estimate_s for request in pending)
    began = clock.now
    while pending or running:
        while (granted := host.acquire_next(pending)) is not None:
            running.append((clock.now + pending[granted[0]].estimate_s, granted[1]))
            pending.pop(granted[0])
        held = [device for _, lease in running for device in lease.devices]
        assert len(held) == len(set(held))
        assert running
        clock.now = min(end for end, _ in running)
        for end, lease in running:
            if end <= clock.now:
                lease.release()
        running = [(end, lease) for end, lease in running if end > clock.now]
    assert clock.now - began <= sum(request.estimate_s for request in (Request("", k, s) for k, s in jobs))
    assert clock.now - began >= area / 8
    host.close()


def test_test_is_told_its_devices_ports_and_folder(tmp_path):
    lease = manager(tmp_path).acquire_next([Request("a", 2, 1)])[1]
    env = slots.lease_environment(lease, "cuda")
    described = json.loads(env["MILES_CI_LEASE"])
    assert described["devices"] == ["0000:00:00.0", "0000:01:00.0"]
    assert described["ports"] == [lease.port_base, lease.port_base + 200]
    assert env["TMPDIR"] == str(lease.tmpdir)


def test_request_that_can_never_start_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match="a: needs 4 device\\(s\\), this runner may use 2"):
        slots.check_requests([Request("a", 4, 1)], 2)


def test_lock_folder_that_cannot_be_used_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LeaseError, match="MILES_CI_LOCK_DIR"):
        LeaseManager(tmp_path / "file" / "below", DEVICES)


def test_damaged_lock_content_counts_as_unknown_end(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    lease = first.acquire_next([Request("a", 8, 100)])[1]
    os.pwrite(lease.fds[1], b"\xff{", 0)
    assert second.acquire_next([Request("b", 1, 1)]) is None
    lease.release()


def test_waiting_ends_at_the_limit_and_withdraws_the_ticket(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    lease = first.acquire_next([Request("a", 8, 100)])[1]
    started = time.monotonic()
    assert second.acquire(Request("b", 1, 1), wait_s=0.2, poll_s=0.05) is None
    assert time.monotonic() - started < 5
    assert not list((tmp_path / "waiting").iterdir())
    lease.release()


def _with_package() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(slots.__file__).resolve().parents[3])}
