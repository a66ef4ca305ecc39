"""The program that talks to GPU drivers, always in a process of its own: a sick driver hangs or dies here.

    python -S -E -c "... from ci.run.probe import main" health|count|occupancy cuda|rocm

Prints one JSON object. CUDA goes through libcuda and libnvidia-ml, HIP through libamdhip64, all by ctypes, so that no
framework is needed and none is trusted. `CUDA_VISIBLE_DEVICES` / `HIP_VISIBLE_DEVICES` act as in any program, except
on `occupancy`, which sees every device of the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, Protocol

BLOCK_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096


class DriverError(Exception):
    """A driver call that did not return success; `code` is the driver's own number."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code}{f' ({text})' if text else ''}")
        self.code = code


class Driver(Protocol):
    """What a health check needs of CUDA and HIP alike. Devices are indices among the visible ones."""

    library: str

    def init(self) -> None: ...
    def count(self) -> int: ...
    def version(self) -> int: ...
    def name(self, device: int) -> str: ...
    def open(self, device: int) -> None: ...
    def allocate(self, size: int) -> int: ...
    def write(self, address: int, data: bytes) -> None: ...
    def read(self, address: int, size: int) -> bytes: ...
    def free(self, address: int) -> None: ...
    def peer_capable(self, source: int, target: int) -> bool: ...
    def copy_peer(self, target: int, to: int, source: int, address: int, size: int) -> None: ...


class _Library:
    """A shared library whose functions return 0 for success."""

    error_text = ""

    def __init__(self, names: tuple[str, ...]) -> None:
        for name in names:
            try:
                self._handle = ctypes.CDLL(name)
                self.library = name
                return
            except OSError:
                continue
        raise DriverError(names[0], -1, "the library cannot be loaded; is the driver installed?")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._handle, name)(*arguments)
        if code != 0:
            raise DriverError(name, code, self.describe(code))

    def describe(self, code: int) -> str:
        return ""


class CudaDriver(_Library):
    def __init__(self) -> None:
        super().__init__(("libcuda.so.1", "libcuda.so"))
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def describe(self, code: int) -> str:
        text = ctypes.c_char_p()
        if (
            getattr(self._handle, "cuGetErrorString", None)
            and self._handle.cuGetErrorString(code, ctypes.byref(text)) == 0
        ):
            return (text.value or b"").decode(errors="replace")
        return ""

    def init(self) -> None:
        self.call("cuInit", 0)

    def count(self) -> int:
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def version(self) -> int:
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def open(self, device: int) -> None:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self.call("cuCtxSetCurrent", self._contexts[device])

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_char_p(data), ctypes.c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return buffer.raw

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def peer_capable(self, source: int, target: int) -> bool:
        able = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(able), target, source)
        return bool(able.value)

    def copy_peer(self, target: int, to: int, source: int, address: int, size: int) -> None:
        self.call(
            "cuMemcpyPeer",
            ctypes.c_uint64(to),
            self._contexts[target],
            ctypes.c_uint64(address),
            self._contexts[source],
            ctypes.c_size_t(size),
        )


class HipDriver(_Library):
    def __init__(self) -> None:
        super().__init__(("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"))

    def describe(self, code: int) -> str:
        function = getattr(self._handle, "hipGetErrorString", None)
        if function is None:
            return ""
        function.restype = ctypes.c_char_p
        return (function(code) or b"").decode(errors="replace")

    def init(self) -> None:
        self.call("hipInit", 0)

    def count(self) -> int:
        found = ctypes.c_int()
        self.call("hipGetDeviceCount", ctypes.byref(found))
        return found.value

    def version(self) -> int:
        found = ctypes.c_int()
        self.call("hipDriverGetVersion", ctypes.byref(found))
        return found.value

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("hipDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def open(self, device: int) -> None:
        self.call("hipSetDevice", device)

    def allocate(self, size: int) -> int:
        address = ctypes.c_void_p()
        self.call("hipMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value or 0

    def write(self, address: int, data: bytes) -> None:
        self.call("hipMemcpy", ctypes.c_void_p(address), ctypes.c_char_p(data), ctypes.c_size_t(len(data)), 1)

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.call("hipMemcpy", buffer, ctypes.c_void_p(address), ctypes.c_size_t(size), 2)
        return buffer.raw

    def free(self, address: int) -> None:
        self.call("hipFree", ctypes.c_void_p(address))

    def peer_capable(self, source: int, target: int) -> bool:
        able = ctypes.c_int()
        self.call("hipDeviceCanAccessPeer", ctypes.byref(able), target, source)
        return bool(able.value)

    def copy_peer(self, target: int, to: int, source: int, address: int, size: int) -> None:
        self.call("hipMemcpyPeer", ctypes.c_void_p(to), target, ctypes.c_void_p(address), source, ctypes.c_size_t(size))


def pattern(device: int, chunk: int, size: int = CHUNK_BYTES) -> bytes:
    """Bytes that differ from page to page and from device to device, so that swapped or stale memory shows."""
    body = bytes((index * 167 + 13) & 0xFF for index in range(PAGE_BYTES - 8))
    pages = -(-size // PAGE_BYTES)
    whole = b"".join(body + (device << 48 | chunk << 24 | page).to_bytes(8, "little") for page in range(pages))
    return whole[:size]


def _chunks(size: int) -> list[tuple[int, int, int]]:
    """(number, offset, length) of the pieces in which a block is written and read."""
    return [
        (number, offset, min(CHUNK_BYTES, size - offset)) for number, offset in enumerate(range(0, size, CHUNK_BYTES))
    ]


def check_device(driver: Driver, device: int, size: int) -> int:
    """Context, allocation, write, read back, compare; returns the address, still allocated and filled."""
    driver.open(device)
    address = driver.allocate(size)
    for number, offset, length in _chunks(size):
        driver.write(address + offset, pattern(device, number, length))
    compare(driver, address, device, size, "read back")
    return address


def compare(driver: Driver, address: int, device: int, size: int, doing: str) -> None:
    """Does the memory hold the pattern of `device`?"""
    for number, offset, length in _chunks(size):
        written, back = pattern(device, number, length), driver.read(address + offset, length)
        if back != written:
            place = next(index for index in range(length) if back[index] != written[index])
            text = f"byte {offset + place} of {size} is {back[place]}, written was {written[place]}"
            raise DriverError(doing, -2, text)


def health(driver: Driver, size: int = BLOCK_BYTES) -> dict[str, Any]:
    """Every visible device through `check_device`, then copies between neighbours where the driver supports them."""
    driver.init()
    count = driver.count()
    if count == 0:
        return {"ok": False, "code": -3, "error": "no device is visible", "devices": []}
    devices: list[dict[str, Any]] = []
    addresses: list[int] = []
    for device in range(count):
        try:
            addresses.append(check_device(driver, device, size))
        except DriverError as error:
            return {"ok": False, "code": error.code, "error": f"device {device}: {error}", "devices": devices}
        devices.append({"index": device, "name": driver.name(device)})
    peers = 0
    # From the last pair down: each source still holds its own pattern when it is its turn.
    for source in reversed(range(count - 1)):
        target = source + 1
        if not driver.peer_capable(source, target):
            continue
        try:
            driver.open(target)
            driver.copy_peer(target, addresses[target], source, addresses[source], size)
            compare(driver, addresses[target], source, size, "peer copy")
        except DriverError as error:
            return {"ok": False, "code": error.code, "error": f"peer {source} -> {target}: {error}", "devices": devices}
        peers += 1
    for device, address in enumerate(addresses):
        driver.open(device)
        driver.free(address)
    return {"ok": True, "devices": devices, "peer_copies": peers, "driver_version": driver.version()}


def open_driver(backend: str) -> Driver:
    return CudaDriver() if backend == "cuda" else HipDriver()


def count_visible(backend: str) -> dict[str, Any]:
    driver = open_driver(backend)
    try:
        driver.init()
        return {"ok": True, "count": driver.count()}
    except DriverError as error:
        # 100: "no device", the driver's way of saying zero.
        if error.code == 100:
            return {"ok": True, "count": 0}
        raise


def main() -> None:
    what, backend = sys.argv[1:3]
    try:
        if what == "health":
            answer = health(open_driver(backend), int(sys.argv[3]) if len(sys.argv) > 3 else BLOCK_BYTES)
        elif what == "count":
            answer = count_visible(backend)
        elif what == "occupancy":
            from ci.run import occupancy

            answer = {"ok": True, "devices": occupancy.read(backend)}
        else:
            raise SystemExit(f"probe: {what!r} is not known")
    except DriverError as error:
        answer = {"ok": False, "code": error.code, "error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    # Driver destructors can hang on a sick device; the answer is out, so leave at once.
    os._exit(0)
