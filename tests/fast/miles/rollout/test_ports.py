"""Port leases keep other processes and other leases off until the server starts."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from miles.rollout import ports
from miles.rollout.errors import PortError
from miles.rollout.ports import PortTaken, lease_ports, start_on_leased_ports


def can_bind(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture
def two_ports(monkeypatch):
    """A range of two ports that are free now and that no other test takes: outside of what runs lease, and locked."""
    for first in range(12000, 19998, 2):
        with (Path(tempfile.gettempdir()) / f"miles-test-ports-{os.getuid()}-{first}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if can_bind(first) and can_bind(first + 1):
                monkeypatch.setattr(ports, "FIRST_PORT", first)
                monkeypatch.setattr(ports, "LAST_PORT", first + 1)
                yield first
                return
    raise AssertionError("no two neighbouring ports are free")


def test_a_lease_holds_the_port_until_hand_over(two_ports):
    (lease,) = lease_ports(1)
    with lease:
        assert not can_bind(lease.port)
        lease.hand_over()
        assert can_bind(lease.port)
        # The lock still keeps other leases off.
        (other,) = lease_ports(1)
        with other:
            assert other.port != lease.port
            with pytest.raises(PortError, match="only 0 of 1"):
                lease_ports(1)
    for again in lease_ports(2):
        again.close()


def test_another_process_does_not_get_a_leased_port(two_ports):
    (lease,) = lease_ports(1)
    with lease:
        lease.hand_over()
        code = (
            f"from miles.rollout import ports; ports.FIRST_PORT = ports.LAST_PORT = {lease.port}; ports.lease_ports(1)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "only 0 of 1" in done.stderr


def test_a_failed_lease_gives_back_what_it_had(two_ports):
    with pytest.raises(PortError, match="only 2 of 3"):
        lease_ports(3)
    leases = lease_ports(2)
    for lease in leases:
        lease.close()


def test_a_server_that_finds_its_port_taken_gets_another(two_ports):
    tried = []

    def start(given):
        tried.append(given[0])
        if len(tried) < 3:
            raise PortTaken
        return given[0]

    assert start_on_leased_ports(1, start) == tried[-1]
    assert len(tried) == 3


def test_starting_gives_up_after_five_tries(two_ports):
    def start(given):
        raise PortTaken

    with pytest.raises(PortError, match="5 times"):
        start_on_leased_ports(1, start)
