"""Which network interface the ranks of several nodes talk over."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from miles.orchestrate.errors import PlacementError

# What gloo and NCCL read; without them gloo asks what the host name resolves to, which may be loopback.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_towards(address: str) -> str:
    """Name of this host's interface that a route to `address` uses. `PlacementError` when there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing
        except OSError as error:
            raise PlacementError(f"{socket.gethostname()}: no route to {address} ({error.strerror})") from None
        own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == family and _holds(entry.address, own):
                return name
    raise PlacementError(f"{socket.gethostname()}: no interface has the address {own}, from which {address} is reached")


def _holds(address: str, own: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if found == own:
        return True
    # All of 127.0.0.0/8 is this host, though only one address of it is listed.
    return own.is_loopback and found.is_loopback


def use_interface_of(address: str) -> None:
    """Let gloo and NCCL of this process use the interface towards `address`; what the user exported stays."""
    name = interface_towards(address)
    for variable in VARIABLES:
        os.environ.setdefault(variable, name)
