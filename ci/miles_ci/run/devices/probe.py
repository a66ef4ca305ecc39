"""The program that talks to GPU drivers, always in a process of its own: a sick driver hangs or dies here.

    python -S -E -c "... from miles_ci.run.devices.probe import main" health|count|occupancy cuda|rocm

Prints one JSON object. CUDA goes through libcuda and libnvidia-ml, HIP through libamdhip64, all by ctypes, so that no
framework is needed and none is trusted. `CUDA_VISIBLE_DEVICES` / `HIP_VISIBLE_DEVICES` act as in any program, except
on `occupancy`, which sees every device of the host.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from miles_ci.run.devices.drivers import Driver, DriverError, open_driver

BLOCK_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096


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
            from miles_ci.run.devices import occupancy

            answer = {"ok": True, "devices": occupancy.read(backend)}
        else:
            raise SystemExit(f"probe: {what!r} is not known")
    except DriverError as error:
        answer = {"ok": False, "code": error.code, "error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    # Driver destructors can hang on a sick device; the answer is out, so leave at once.
    os._exit(0)
