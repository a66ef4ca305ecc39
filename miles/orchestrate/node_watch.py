"""Whether the nodes of a run are still there: a lost one ends the run in bounded time, with its name."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from miles.config import ConfigError
from miles.orchestrate.errors import NodeLost
from miles.orchestrate.placement import Placement

POLL_S = 1.0
CONNECT_S = 2.0
# After an error: how long a node's death may need to show, which other ranks and engines notice first.
AFTERMATH_S = 5.0
RESUME_HINT = "what was saved is kept: run the same command again to resume"


@contextlib.asynccontextmanager
async def watching_nodes(placement: Placement) -> AsyncIterator[None]:
    """`NodeLost` instead of whatever else a lost node makes of the body, or of waiting for it."""
    if not placement.leaves_the_driver:
        yield
        return
    body = asyncio.current_task()
    assert body is not None
    found: list[str] = []

    async def watch() -> None:
        while not found:
            await asyncio.sleep(POLL_S)
            found.extend(await asyncio.to_thread(lost_nodes, placement))
        body.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not found:
            raise
        body.uncancel()
        raise _loss(placement, found) from None
    except ConfigError:
        raise
    except Exception as error:
        watcher.cancel()
        found.extend(await _aftermath(placement))
        if found:
            raise _loss(placement, found) from error
        raise
    finally:
        watcher.cancel()


async def _aftermath(placement: Placement) -> list[str]:
    deadline = asyncio.get_running_loop().time() + AFTERMATH_S
    while True:
        lost = await asyncio.to_thread(lost_nodes, placement)
        if lost or asyncio.get_running_loop().time() > deadline:
            return lost
        await asyncio.sleep(POLL_S / 4)


def lost_nodes(placement: Placement) -> list[str]:
    """Ids of the placement's nodes that the cluster has given up, or whose Ray daemon refuses connections."""
    import ray

    try:
        table = {node["NodeID"]: node for node in ray.nodes()}
    except Exception:  # a head that is away is met by every call of the run itself
        return []
    return [node.id for node in placement.nodes if _is_lost(table.get(node.id))]


def _is_lost(entry: dict[str, Any] | None) -> bool:
    if entry is None or not entry["Alive"]:
        return True
    try:
        address = (entry["NodeManagerAddress"], entry["NodeManagerPort"])
        socket.create_connection(address, timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        # The host answers and nobody listens: the daemon is gone, which Ray itself notices a quarter minute later.
        return True
    except OSError:
        # Silence may be a slow network: Ray's own health check decides.
        return False
    return False


def _loss(placement: Placement, ids: list[str]) -> NodeLost:
    said = []
    for node_id in dict.fromkeys(ids):
        ranks = [str(rank) for rank, device in enumerate(placement.trainer_devices) if device.node == node_id]
        engines = [str(index) for index, device in enumerate(placement.engine_devices) if device.node == node_id]
        held = [f"trainer rank {', '.join(ranks)}"] if ranks else []
        held += [f"engine {', '.join(engines)}"] if engines else []
        said.append(f"node {placement.cluster.node(node_id).address} ({node_id[:8]}) with {' and '.join(held)}")
    return NodeLost(
        f"lost {'; '.join(said)}; {RESUME_HINT}, on the nodes that are left if they have room for it (--dry-run says)"
    )
