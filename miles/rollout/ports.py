"""Ports for servers that are not ours and cannot report the port they bound.

A lease holds a file lock (other runs of this user keep off) and a bound socket (everyone else keeps off) until
`hand_over`, right before the server starts. Our own servers bind port 0 instead and need no lease.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from miles.rollout.errors import PortError

FIRST_PORT, LAST_PORT = 20000, 31999
START_TRIES = 5

T = TypeVar("T")


class PortTaken(Exception):
    """Raised by a starter whose server reported EADDRINUSE."""


class PortLease:
    """One leased port. `hand_over()` frees the socket for the server, `close()` (or `with`) ends the lease."""

    def __init__(self, port: int, bound: socket.socket, lock_fd: int) -> None:
        self.port = port
        self._bound: socket.socket | None = bound
        self._lock_fd: int | None = lock_fd

    def __enter__(self) -> PortLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hand_over(self) -> int:
        """Close our socket so that the server can bind; the file lock stays. Returns the port."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None
        return self.port

    def close(self) -> None:
        self.hand_over()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def lease_ports(count: int, *, host: str = "127.0.0.1") -> list[PortLease]:
    """`count` different ports in 20000-31999, in random order; `PortError` when there are not enough."""
    leases: list[PortLease] = []
    candidates = list(range(FIRST_PORT, LAST_PORT + 1))
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if len(leases) == count:
            break
        lease = _try_lease(port, host)
        if lease is not None:
            leases.append(lease)
    if len(leases) < count:
        for lease in leases:
            lease.close()
        raise PortError(f"only {len(leases)} of {count} ports in {FIRST_PORT}-{LAST_PORT} are free on {host}")
    return leases


def _lock_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"miles-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _try_lease(port: int, host: str) -> PortLease | None:
    lock_fd = os.open(_lock_folder() / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        os.close(lock_fd)
        if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EAGAIN):
            return None
        raise PortError(f"cannot bind {host}:{port}: {error.strerror}") from error
    return PortLease(port, bound, lock_fd)


def start_on_leased_ports(count: int, start: Callable[[list[int]], T], *, host: str = "127.0.0.1") -> T:
    """Call `start(ports)` with fresh leases until it does not raise `PortTaken`, at most 5 times."""
    for _ in range(START_TRIES):
        with contextlib.ExitStack() as stack:
            leases = [stack.enter_context(lease) for lease in lease_ports(count, host=host)]
            with contextlib.suppress(PortTaken):
                return start([lease.hand_over() for lease in leases])
    raise PortError(f"a server found its leased ports taken {START_TRIES} times in a row on {host}")
