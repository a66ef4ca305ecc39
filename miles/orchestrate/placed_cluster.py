"""From a recipe to a running Ray cluster with a placement on it: the command's own cluster, or one that is there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from miles.orchestrate.cluster import local_cluster
from miles.orchestrate.errors import PlacementError
from miles.orchestrate.joined_cluster import cluster_address, joined_cluster, read_facts
from miles.orchestrate.machine import this_machine
from miles.orchestrate.placement import ClusterFacts, Placement, place
from miles.recipe import Recipe
from miles.recipe.placement import ClusterConfig

POLL_S = 0.5


@contextlib.contextmanager
def placed_cluster(
    recipe: Recipe, *, engines: bool = True, note: Callable[[str], None] = lambda _: None
) -> Iterator[Placement]:
    """Refuse what cannot be placed, start or join the cluster, yield where everything goes.

    `note` is told when the start has to wait for another run's.
    """
    address = cluster_address(recipe.cluster)
    if address is not None:
        with joined_cluster(address):
            yield place_when_free(recipe, engines=engines)
        return
    machine = this_machine()
    placement = place(recipe, machine, engines=engines)
    uses_gpus = any(bundle.gpus for bundle in placement.bundles)
    cpus, gpus = sum(bundle.cpus for bundle in placement.bundles), machine.nodes[0].gpus if uses_gpus else 0
    with local_cluster(cpus=cpus, gpus=gpus, note=note):
        yield placement


def check_placement(recipe: Recipe) -> None:
    """`PlacementError` or `ClusterError` for a run that has no place, with nothing started and nothing written."""
    place(recipe, known_facts(recipe.cluster))


def place_when_free(recipe: Recipe, *, engines: bool = True) -> Placement:
    """Refused at once when the whole joined cluster is too small, after `cluster.wait_s` when others use too much."""
    place(recipe, read_facts(free=False), engines=engines)
    deadline = time.monotonic() + recipe.cluster.wait_s
    while True:
        try:
            return place(recipe, read_facts(free=True), engines=engines)
        except PlacementError as error:
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"{error} (others use the rest of the cluster; waited cluster.wait_s {recipe.cluster.wait_s:g} s)"
                ) from None
        time.sleep(POLL_S)


def known_facts(config: ClusterConfig) -> ClusterFacts:
    """What a run would find, with nothing started: this machine, or the cluster that is there."""
    address = cluster_address(config)
    if address is None:
        return this_machine()
    with joined_cluster(address):
        return read_facts(free=False)
