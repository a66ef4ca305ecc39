"""A Ray cluster that somebody else started: joined as a driver, read, and left as it was.

Only the run's own actors and placement group end with the run. The command must run on a node of the cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from miles.config import environment
from miles.orchestrate.bounded import BoundedCalls
from miles.orchestrate.errors import ClusterError
from miles.orchestrate.placement import ClusterFacts, NodeFacts
from miles.orchestrate.stop_signals import keeping_signal_handlers
from miles.recipe.placement import ClusterConfig, check_address

CONNECT_S = 5.0
JOIN_LIMIT_S = 120.0
LEAVE_LIMIT_S = 20.0


def cluster_address(config: ClusterConfig) -> str | None:
    """The cluster to join, None for one of the command's own. `ClusterError` when recipe and RAY_ADDRESS disagree."""
    exported = (environment.read("RAY_ADDRESS") or "").strip() or None
    if exported is not None:
        try:
            check_address(exported)
        except ValueError as error:
            raise ClusterError(f"environment variable RAY_ADDRESS: {error}") from None
    if None not in (config.address, exported) and config.address != exported:
        raise ClusterError(
            f"cluster.address is {config.address}, but the environment variable RAY_ADDRESS is {exported}; remove one of "
            "them"
        )
    chosen = config.address or exported
    return None if chosen == "local" else chosen


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """Connect this process as a driver, yield, disconnect; both are bounded, for Ray waits for ever for a stuck daemon."""
    _knock(address)
    # As exported: how to authenticate is the cluster's to say.
    import ray

    calls = BoundedCalls()

    def leave() -> None:
        if not calls.finishes_within(LEAVE_LIMIT_S, ray.shutdown):
            # The interpreter's end must not wait either.
            atexit.unregister(ray.shutdown)
        calls.close()

    with keeping_signal_handlers(leave) as joined:
        _join(calls, address)
        joined()
        yield


def _join(calls: BoundedCalls, address: str) -> None:
    def join() -> None:
        ray.init(
            address=address, log_to_driver=False, configure_logging=False, namespace="miles", ignore_reinit_error=False
        )

    import ray

    reason, cause = f"no answer for {JOIN_LIMIT_S:g} s", None
    try:
        if calls.finishes_within(JOIN_LIMIT_S, join):
            return
    except Exception as error:
        reason, cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__, error
    raise ClusterError(
        f"cluster.address {address}: {reason}; start the command on a node of the cluster, with the settings "
        "(RAY_AUTH_MODE, RAY_AUTH_TOKEN) that it was started with"
    ) from cause


def _knock(address: str) -> None:
    """Ray itself tries a silent address for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"cluster.address {address}: nothing answers there ({error.strerror or error}); give host:port of the head "
            "node, as `ray start --head` printed it"
        ) from None


def read_facts(*, free: bool) -> ClusterFacts:
    """The joined cluster's living nodes with all they have, or with what nobody uses now (`free`)."""
    import ray
    from ray._private import state

    # Ray tells per-node availability by its developer interface only.
    available = state.available_resources_per_node() if free else {}
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            resources: dict[str, Any] = available.get(node["NodeID"], {}) if free else node["Resources"]
            cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
            memory = int(node["Resources"].get("memory", 0))
            nodes.append(NodeFacts(node["NodeID"], node["NodeManagerAddress"], cpus, gpus, memory))
    return ClusterFacts(tuple(nodes), driver=ray.get_runtime_context().get_node_id())
