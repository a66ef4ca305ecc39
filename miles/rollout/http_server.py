"""Serve an ASGI application on a socket that we bound ourselves, so that its port is known before it starts."""

from __future__ import annotations

import socket

from miles.rollout.errors import PortError


def listen(host: str, port: int, *, option: str) -> socket.socket:
    """A listening socket; port 0 takes a free one. `PortError` names the `option` that chose the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay off only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PortError(
            f"{option} {port} on {host}: {error.strerror}; choose another port, or 0 for a free one"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket; IPv6 hosts are bracketed."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
