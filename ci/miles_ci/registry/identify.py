"""Which model of the registry a device of this machine is."""

from __future__ import annotations

import re

from miles_ci.registry.model import Fleet

# Of a device's memory some is always taken by driver and firmware; more than this share missing is a fault.
MEMORY_TOLERANCE = 0.97


def model_of(fleet: Fleet, backend: str, device_name: str) -> str | None:
    """The model whose name is a word of the device's name ("NVIDIA H200" -> h200); the longest one wins."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    names = [
        name
        for name, hardware in fleet.hardware.items()
        if hardware.vendor == fleet.vendor_of(backend) and name.lower() in words
    ]
    return max(names, key=len) if names else None
