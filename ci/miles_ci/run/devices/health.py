"""Are these devices usable? Listing them is no proof: error 802 appears only when one is used.

`check` runs the probe on exactly the given devices: driver init, a context on each, 256 MiB written, read back and
compared, copies between neighbours. `wait_for_memory` refuses to start a test on a device that someone else fills.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_ci.run.devices import probe_child
from miles_ci.run.devices.added import AddedBackend, DeviceBackend
from miles_ci.run.devices.inventory import Device, DeviceUser, occupancy, with_visibility

LIMIT_S = 60.0
FREE_SHARE = 0.95
POLL_S = 2.0
WAIT_S = 120.0


@dataclass(frozen=True)
class Health:
    """`code` is the driver's error number, or negative: -1 no library, -2 wrong data, -3 none visible,
    -4 no answer in time, -5 the probe died. `driver_version` as the driver states it (13000 = 13.0)."""

    ok: bool
    error: str = ""
    code: int = 0
    peer_copies: int = 0
    driver_version: int = 0


def check(
    devices: Sequence[Device],
    backend: DeviceBackend,
    *,
    limit_s: float = LIMIT_S,
    block_bytes: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Health:
    """Health of these devices and no others, in a child process that is killed after `limit_s` seconds."""
    env = with_visibility(os.environ if environ is None else environ, devices, backend)
    extra = () if block_bytes is None else (str(block_bytes),)
    if isinstance(backend, AddedBackend):
        answer = backend.ask_health(env, limit_s)
    else:
        answer = probe_child.ask("health", backend, *extra, limit_s=limit_s, environ=env)
    if not answer["ok"]:
        return Health(False, answer["error"], int(answer.get("code", -5)))
    if len(answer["devices"]) != len(devices):
        return Health(False, f"{len(devices)} device(s) were leased, {len(answer['devices'])} are visible", -3)
    return Health(True, peer_copies=answer["peer_copies"], driver_version=answer["driver_version"])


@dataclass(frozen=True)
class Occupied:
    """A device without enough free memory, and who uses it."""

    device: Device
    free_mib: int
    needed_mib: int
    users: tuple[DeviceUser, ...]

    def text(self) -> str:
        who = "; ".join(
            f"pid {user.pid}, {'?' if user.mib is None else user.mib} MiB, {user.command}" for user in self.users
        )
        return (
            f"device {self.device.index} ({self.device.bus_id}) has {self.free_mib} MiB free, "
            f"needs {self.needed_mib} MiB; in use by: {who or 'no process visible from here'}"
        )


def needed_mib(device: Device, min_memory_gib: float | None) -> int:
    """max(what the test asks for, 95 % of the device): a device is meant to be empty."""
    return max(round((min_memory_gib or 0) * 1024), int(device.total_mib * FREE_SHARE))


def wait_for_memory(
    devices: Sequence[Device],
    backend: DeviceBackend,
    *,
    min_memory_gib: float | None = None,
    wait_s: float = WAIT_S,
    poll_s: float = POLL_S,
    cancelled: Callable[[], bool] = lambda: False,
    read: Callable[[DeviceBackend], dict[str, tuple[int, tuple[DeviceUser, ...]]]] = occupancy,
) -> tuple[Occupied, ...]:
    """Poll until every device has enough free memory; what still has not after `wait_s` is returned."""
    deadline = time.monotonic() + wait_s
    while True:
        now = read(backend)
        occupied = []
        for device in devices:
            free, users = now.get(device.bus_id, (0, ()))
            needed = needed_mib(device, min_memory_gib)
            if free < needed:
                occupied.append(Occupied(device, free, needed, users))
        if not occupied or time.monotonic() + poll_s > deadline or cancelled():
            return tuple(occupied)
        time.sleep(poll_s)
