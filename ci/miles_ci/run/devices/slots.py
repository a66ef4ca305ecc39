"""Leases on devices, ports and a temporary folder, exclusive among all runner processes of a host.

One `flock` file per device (named by PCI bus id); a lease takes k of them under one allocator lock, so two runners
never hold half each. The kernel gives the locks back when every process that inherited them is dead: the runner and
the supervisor of the test, so a lease outlives a killed runner for as long as its test's tree does.

A request that cannot be served publishes a ticket. Anyone younger may start in front of it only if that cannot delay
it: enough devices stay free, or the younger one is expected to end before the ticket's reserved start. So eight-GPU
tests are not starved by a stream of small ones, whichever runner those come from.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_ci.errors import UsageError
from miles_ci.run.devices.added import AddedBackend, DeviceBackend
from miles_ci.run.devices.inventory import Device
from miles_ci.run.devices.locks import LeaseError, open_lock, read_json, try_lock, write_json
from miles_ci.run.devices.temporary import make_folder, remove_abandoned

DEFAULT_FOLDER = Path("/tmp/miles-ci-locks")
PORT_BASE = 20_000
PORTS_PER_LEASE = 200
PORT_RANGES = 60


@dataclass(frozen=True)
class Request:
    """`count` devices for about `estimate_s` seconds; `label` is shown to other runners."""

    label: str
    count: int
    estimate_s: float


@dataclass
class Lease:
    """What one test may use. `fds` hold the locks: hand them to the supervisor, never to the test."""

    request: Request
    devices: tuple[Device, ...]
    port_base: int
    tmpdir: Path
    fds: tuple[int, ...]
    released: bool = False

    def release(self) -> None:
        if self.released:
            return
        self.released = True
        shutil.rmtree(self.tmpdir, ignore_errors=True)
        for fd in self.fds:
            os.close(fd)


@dataclass(frozen=True)
class _Waiting:
    """Somebody's published ticket."""

    count: int
    devices: frozenset[str]
    since: float


@dataclass
class _Survey:
    """The devices as seen under the allocator lock: fds of the free ones, expected end of the others."""

    free: dict[str, int] = field(default_factory=dict)
    busy_until: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        for fd in self.free.values():
            os.close(fd)
        self.free.clear()


class LeaseManager:
    """One per runner process. `devices` are those this runner may use; none for a CPU runner."""

    def __init__(
        self,
        folder: Path,
        devices: Sequence[Device] = (),
        *,
        clock: Callable[[], float] = time.time,
        tmp_parent: Path | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self._folder = folder
        self._clock = clock
        self._tmp_parent = tmp_parent
        self._ticket: tuple[Path, int, float] | None = None
        try:
            for path in (folder, folder / "waiting"):
                path.mkdir(parents=True, exist_ok=True)
                # Runners of a host may be different users.
                with contextlib.suppress(PermissionError):
                    path.chmod(0o1777)
        except OSError as error:
            raise LeaseError(
                f"lock folder {folder}: {error}; set MILES_CI_LOCK_DIR to a folder all runners share"
            ) from error
        remove_abandoned(tmp_parent)

    def acquire_next(self, requests: Sequence[Request]) -> tuple[int, Lease] | None:
        """The first request, in order, that may start now, with its lease; None when none may.

        The first request of the list is the head: when it cannot start, its ticket is published, and later ones
        are served only if they cannot delay it.
        """
        if not requests:
            self._withdraw()
            return None
        with self._allocator():
            survey = self._survey()
            try:
                waiting = self._waiting()
                for place, request in enumerate(requests):
                    chosen = self._choose(request, survey)
                    head_ticket = self._ticket if place == 0 else None
                    if chosen is None or not self._fair(request, chosen, survey, waiting, head_ticket):
                        if place == 0:
                            self._publish(request)
                            waiting = self._waiting()
                        continue
                    lease = self._grant(request, chosen, survey)
                    if lease is None:
                        return None
                    if place == 0:
                        self._withdraw()
                    return place, lease
                return None
            finally:
                survey.close()

    def acquire(self, request: Request, *, poll_s: float = 0.2, wait_s: float | None = None) -> Lease | None:
        """Wait for one request; None after `wait_s` seconds."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            granted = self.acquire_next([request])
            if granted is not None:
                return granted[1]
            if deadline is not None and time.monotonic() >= deadline:
                self.close()
                return None
            time.sleep(poll_s)

    def close(self) -> None:
        """Withdraw the ticket, if any. Leases are released one by one."""
        with self._allocator():
            self._withdraw()

    @contextlib.contextmanager
    def _allocator(self) -> Iterator[None]:
        fd = open_lock(self._folder / "allocator.lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _survey(self) -> _Survey:
        survey = _Survey()
        for device in self.devices:
            fd = open_lock(self._folder / f"device-{device.bus_id.replace(':', '-')}.lock")
            if try_lock(fd):
                survey.free[device.bus_id] = fd
                continue
            survey.busy_until[device.bus_id] = float(read_json(fd).get("until", self._clock()))
            os.close(fd)
        return survey

    def _choose(self, request: Request, survey: _Survey) -> tuple[Device, ...] | None:
        """The first free devices in PCI order: neighbours share the fastest links."""
        free = [device for device in self.devices if device.bus_id in survey.free]
        if len(free) < request.count:
            return None
        if request.count > 1:
            # An aligned block if there is one, so that pairs and quads do not fragment the host.
            for start in range(0, len(self.devices) - request.count + 1, request.count):
                block = self.devices[start : start + request.count]
                if all(device.bus_id in survey.free for device in block):
                    return block
        return tuple(free[: request.count])

    def _fair(
        self,
        request: Request,
        chosen: Sequence[Device],
        survey: _Survey,
        waiting: Sequence[_Waiting],
        own: tuple[Path, int, float] | None,
    ) -> bool:
        """May `request` start on `chosen` without delaying anybody who has waited longer?"""
        now = self._clock()
        taken = {device.bus_id for device in chosen}
        for other in waiting:
            if own is not None and other.since >= own[2]:
                continue
            if not taken & other.devices:
                continue
            still_free = [bus_id for bus_id in survey.free if bus_id in other.devices and bus_id not in taken]
            if len(still_free) >= other.count:
                continue
            ends = sorted(
                now if bus_id in survey.free else max(now, survey.busy_until.get(bus_id, now))
                for bus_id in other.devices
            )
            if now + request.estimate_s > ends[other.count - 1]:
                return False
        return True

    def _grant(self, request: Request, chosen: Sequence[Device], survey: _Survey) -> Lease | None:
        ports = self._take_ports()
        if ports is None:
            return None
        port_fd, port_base = ports
        fds = [port_fd, *(survey.free.pop(device.bus_id) for device in chosen)]
        entry = {"pid": os.getpid(), "label": request.label, "until": self._clock() + request.estimate_s}
        for fd in fds:
            write_json(fd, entry)
        tmpdir, kept = make_folder(self._tmp_parent)
        return Lease(request, tuple(chosen), port_base, tmpdir, (*fds, kept))

    def _take_ports(self) -> tuple[int, int] | None:
        for index in range(PORT_RANGES):
            fd = open_lock(self._folder / f"ports-{index:02d}.lock")
            if try_lock(fd):
                return fd, PORT_BASE + index * PORTS_PER_LEASE
            os.close(fd)
        return None

    def _waiting(self) -> list[_Waiting]:
        """Live tickets; those whose process is dead are removed."""
        found = []
        for path in sorted((self._folder / "waiting").glob("*.json")):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if try_lock(fd):
                    path.unlink(missing_ok=True)
                    continue
                entry = read_json(fd)
                if entry:
                    found.append(_Waiting(entry["count"], frozenset(entry["devices"]), entry["since"]))
            finally:
                os.close(fd)
        return found

    def _publish(self, request: Request) -> None:
        since = self._ticket[2] if self._ticket is not None else self._clock()
        if self._ticket is None:
            path = self._folder / "waiting" / f"{uuid.uuid4().hex}.json"
            fd = open_lock(path)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._ticket = (path, fd, since)
        devices = [device.bus_id for device in self.devices]
        write_json(self._ticket[1], {"count": request.count, "devices": devices, "since": since, "pid": os.getpid()})

    def _withdraw(self) -> None:
        if self._ticket is not None:
            path, fd, _ = self._ticket
            path.unlink(missing_ok=True)
            os.close(fd)
            self._ticket = None


def lease_environment(lease: Lease, backend: DeviceBackend) -> dict[str, str]:
    """Variables that tell a test what it was given (visibility variables are `devices.visibility`)."""
    added = backend if isinstance(backend, AddedBackend) else None
    description = {
        "backend": added.name if added else backend,
        **({"visible": added.visible} if added else {}),
        "devices": [device.bus_id for device in lease.devices],
        "ports": [lease.port_base, lease.port_base + PORTS_PER_LEASE],
    }
    return {
        "MILES_CI_PORT_BASE": str(lease.port_base),
        "MILES_CI_LEASE": json.dumps(description, separators=(",", ":")),
        "TMPDIR": str(lease.tmpdir),
    }


def check_requests(requests: Sequence[Request], available: int) -> None:
    """Refuse what can never start here."""
    for request in requests:
        if request.count > available:
            raise UsageError(
                f"{request.label}: needs {request.count} device(s), this runner may use {available}; "
                "choose another suite or widen the visibility variables"
            )
