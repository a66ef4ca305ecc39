"""Who uses how much of which device: NVML on NVIDIA, the amdgpu driver's files on AMD. All devices of the host.

Called inside the probe process. A device is a dict: index, bus_id, uuid, name, total_mib, free_mib, and processes
with pid, mib (None where the driver keeps it to itself) and command.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from miles_ci.run.devices.drivers import DriverError, Library
from miles_ci.run.process.process_tree import command_of

MIB = 1 << 20
_NOT_AVAILABLE = (1 << 64) - 1
_MAX_PROCESSES = 256


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml(Library):
    def __init__(self) -> None:
        super().__init__(("libnvidia-ml.so.1", "libnvidia-ml.so"))

    def describe(self, code: int) -> str:
        function = getattr(self._handle, "nvmlErrorString", None)
        if function is None:
            return ""
        function.restype = ctypes.c_char_p
        return (function(code) or b"").decode(errors="replace")

    def devices(self) -> list[dict[str, Any]]:
        self.call("nvmlInit_v2")
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> dict[str, Any]:
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        memory, pci = _Memory(), _Pci()
        self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        self.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
        return {
            "index": index,
            "bus_id": pci.bus_id.decode().lower(),
            "uuid": self._text("nvmlDeviceGetUUID", handle),
            "name": self._text("nvmlDeviceGetName", handle),
            "total_mib": memory.total // MIB,
            "free_mib": memory.free // MIB,
            "processes": self._processes(handle),
        }

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(96)
        self.call(function, handle, text, len(text))
        return text.value.decode(errors="replace")

    def _processes(self, handle: ctypes.c_void_p) -> list[dict[str, Any]]:
        table = (_ProcessInfo * _MAX_PROCESSES)()
        count = ctypes.c_uint(_MAX_PROCESSES)
        try:
            self.call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), table)
        except (DriverError, AttributeError):
            return []
        return [
            {
                "pid": entry.pid,
                "mib": None if entry.used == _NOT_AVAILABLE else entry.used // MIB,
                "command": command_of(entry.pid, "(not visible from here)"),
            }
            for entry in table[: count.value]
        ]


def amd_devices(sys_root: Path = Path("/sys")) -> list[dict[str, Any]]:
    """AMD devices from sysfs, in PCI order, which is the order of HIP's indices."""
    found = []
    for total in (sys_root / "class" / "drm").glob("card*/device/mem_info_vram_total"):
        device = total.parent
        if "-" in device.parent.name or _word(device / "vendor") != "0x1002":
            continue
        found.append((device.resolve().name, device))
    devices = []
    for index, (bus_id, device) in enumerate(sorted(found)):
        total_bytes = int(_word(device / "mem_info_vram_total"))
        used_bytes = int(_word(device / "mem_info_vram_used"))
        devices.append(
            {
                "index": index,
                "bus_id": bus_id,
                "uuid": "GPU-" + _word(device / "unique_id", bus_id),
                "name": _word(device / "product_name", "AMD GPU"),
                "total_mib": total_bytes // MIB,
                "free_mib": (total_bytes - used_bytes) // MIB,
                "processes": _amd_processes(sys_root, bus_id),
            }
        )
    return devices


def _amd_processes(sys_root: Path, bus_id: str) -> list[dict[str, Any]]:
    """Users of one device according to the compute driver (kfd): class/kfd/kfd/proc/PID/vram_NODE."""
    nodes = set()
    for properties in (sys_root / "class" / "kfd" / "kfd" / "topology" / "nodes").glob("*/properties"):
        values = dict(line.split(None, 1) for line in properties.read_text().splitlines() if " " in line)
        location, domain = int(values.get("location_id", 0)), int(values.get("domain", 0))
        place = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        if place == bus_id:
            nodes.add(_word(properties.parent / "gpu_id"))
    processes = []
    for entry in sorted((sys_root / "class" / "kfd" / "kfd" / "proc").glob("[0-9]*/vram_*")):
        used = int(_word(entry, "0"))
        if entry.name.removeprefix("vram_") in nodes and used > 0:
            pid = int(entry.parent.name)
            processes.append({"pid": pid, "mib": used // MIB, "command": command_of(pid, "(not visible from here)")})
    return processes


def _word(path: Path, fallback: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return fallback


def read(backend: str) -> list[dict[str, Any]]:
    return Nvml().devices() if backend == "cuda" else amd_devices()
