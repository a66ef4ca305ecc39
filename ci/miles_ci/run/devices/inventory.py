"""The accelerators of this host, which of them this runner may use, and how a test is shown only its own.

Identity of a device is its PCI bus id: indices change with the environment, bus ids do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_ci.errors import CiError, ExitCode, UsageError
from miles_ci.run.devices import probe_child
from miles_ci.run.devices.added import AddedBackend, DeviceBackend

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


class DevicesUnavailable(CiError):
    """The driver cannot list the devices of this host."""

    exit_code = ExitCode.INFRA


@dataclass(frozen=True)
class Device:
    """One accelerator. `index` counts all devices of the host in PCI order; memory in MiB."""

    index: int
    bus_id: str
    uuid: str
    name: str
    total_mib: int


@dataclass(frozen=True)
class DeviceUser:
    """A process that holds memory on a device; `mib` is None where the driver does not tell."""

    pid: int
    mib: int | None
    command: str


def host_devices(backend: DeviceBackend) -> tuple[Device, ...]:
    """Every device of the host, in PCI order (of an added backend: in its own order); empty for the cpu backend."""
    if backend == "cpu":
        return ()
    answer = _ask_devices(backend)
    if not answer["ok"]:
        raise DevicesUnavailable(f"devices of this host cannot be listed: {answer['error']}")
    found = answer["devices"]
    if not isinstance(backend, AddedBackend):
        found = sorted(found, key=lambda entry: entry["bus_id"])
    return tuple(
        Device(index, entry["bus_id"], entry["uuid"], entry["name"], entry["total_mib"])
        for index, entry in enumerate(found)
    )


def _ask_devices(backend: DeviceBackend) -> dict[str, Any]:
    return backend.ask_devices() if isinstance(backend, AddedBackend) else probe_child.ask("occupancy", backend)


def occupancy(backend: DeviceBackend) -> dict[str, tuple[int, tuple[DeviceUser, ...]]]:
    """Bus id -> (free MiB, users), as of now; empty when the driver does not answer."""
    answer = _ask_devices(backend)
    return {
        entry["bus_id"]: (
            entry["free_mib"],
            tuple(DeviceUser(user["pid"], user["mib"], user["command"]) for user in entry["processes"]),
        )
        for entry in (answer["devices"] if answer["ok"] else ())
    }


def inherited(
    devices: Sequence[Device], backend: DeviceBackend, environ: Mapping[str, str] | None = None
) -> tuple[Device, ...]:
    """The devices left by the visibility variables this process was started with.

    CUDA: indices (PCI order) or UUIDs. ROCm: `ROCR_VISIBLE_DEVICES` first, then `HIP_VISIBLE_DEVICES` counts within
    what is left. An unset variable restricts nothing, an empty one leaves nothing; as in the drivers, the first entry
    that names no device ends the list.
    """
    env = os.environ if environ is None else environ
    if backend == "cpu":
        return ()
    left = tuple(devices)
    for name in _variables(backend):
        if name in env:
            left = _restrict(left, env[name], name)
    return left


def _variables(backend: DeviceBackend) -> tuple[str, ...]:
    if isinstance(backend, AddedBackend):
        return (backend.visible,)
    return (CUDA,) if backend == "cuda" else (ROCR, HIP)


def _restrict(devices: tuple[Device, ...], value: str, variable: str) -> tuple[Device, ...]:
    chosen: list[Device] = []
    for word in (part.strip() for part in value.split(",")):
        if word.startswith("MIG-"):
            raise UsageError(
                f"{variable}={value}: MIG slices cannot be leased; name whole devices by index or GPU UUID, or unset it"
            )
        device = _named(devices, word)
        if device is None:
            break
        if device in chosen:
            raise UsageError(f"{variable}={value}: names device {device.index} twice")
        chosen.append(device)
    return tuple(chosen)


def _named(devices: Sequence[Device], word: str) -> Device | None:
    if word.isdigit():
        return devices[int(word)] if int(word) < len(devices) else None
    if not word.startswith("GPU-"):
        return None
    matching = [device for device in devices if device.uuid.lower().startswith(word.lower())]
    return matching[0] if len(matching) == 1 else None


def visibility(devices: Sequence[Device], backend: DeviceBackend) -> dict[str, str | None]:
    """Variables that show a process exactly these devices; None means: remove it.

    CPU: both empty. An added backend: its own variable, the others as on CPU. CUDA: UUIDs. ROCm: host indices in HIP_VISIBLE_DEVICES; ROCR_VISIBLE_DEVICES is removed because
    Ray refuses it beside HIP's, CUDA_VISIBLE_DEVICES because HIP would read it too.
    """
    if backend == "cpu":
        return {CUDA: "", HIP: "", ROCR: None}
    if backend == "cuda":
        uuids = ",".join(device.uuid for device in devices)
        return {CUDA: uuids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", HIP: None, ROCR: None}
    indices = ",".join(str(device.index) for device in devices)
    if isinstance(backend, AddedBackend):
        return {backend.visible: indices, CUDA: "", HIP: "", ROCR: None}
    return {HIP: indices, CUDA: None, ROCR: None}


def with_visibility(environ: Mapping[str, str], devices: Sequence[Device], backend: DeviceBackend) -> dict[str, str]:
    """A copy of an environment that shows exactly these devices."""
    env = dict(environ)
    for name, value in visibility(devices, backend).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env
