"""What only this machine can say, looked at in the driver before anything starts: trackers, engine host and port."""

from __future__ import annotations

import socket
import time

from miles.config import ConfigError
from miles.observe.config import ObserveConfig, missing
from miles.rollout.config import EngineConfig
from miles.rollout.errors import PortError
from miles.rollout.http_server import listen

# An engine of a killed run ends a moment after its driver; the same command may be started again at once.
PORT_WAIT_S = 3.0
POLL_S = 0.1


def check_trackers(observe: ObserveConfig) -> None:
    """`ConfigError` with how to install what is missing."""
    if lacking := missing(observe):
        raise ConfigError("\n".join(f"observe.trackers: {name}: {how}" for name, how in lacking.items()))


def check_host(host: str) -> None:
    """`PortError` when nothing can listen on `engine.host`."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        raise PortError(
            f"engine.host {host}: {error.strerror}; use an address of this machine, such as 127.0.0.1"
        ) from None


def check_port(engine: EngineConfig) -> None:
    """`PortError` when a port that the recipe names stays in use."""
    if engine.port == 0:
        return
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            listen(engine.host, engine.port, option="engine.port").close()
            return
        except PortError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
