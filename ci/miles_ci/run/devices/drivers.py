"""CUDA and HIP by ctypes: the few driver calls that a health check needs, with one error type.

Only the probe process imports this. Device numbers are indices among the visible devices.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol


class DriverError(Exception):
    """A driver call that did not return success; `code` is the driver's own number."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code}{f' ({text})' if text else ''}")
        self.code = code


class Driver(Protocol):
    """What a health check needs of CUDA and HIP alike. Devices are indices among the visible ones."""

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


class Library:
    """A shared library whose functions return 0 for success."""

    error_text = ""

    def __init__(self, names: tuple[str, ...]) -> None:
        for name in names:
            try:
                self._handle = ctypes.CDLL(name)
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


class CudaDriver(Library):
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


class HipDriver(Library):
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


def open_driver(backend: str) -> Driver:
    return CudaDriver() if backend == "cuda" else HipDriver()
