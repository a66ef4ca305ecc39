"""A placement as a placement group of Ray: reserved at once, actors started inside it, given back at the end."""

from __future__ import annotations

import contextlib
from typing import Any

from miles.orchestrate.errors import PlacementError
from miles.orchestrate.placement import Device, Placement

NODE_LABEL = "ray.io/node-id"


class Reservation:
    """Ray's placement group for a placement; each bundle is held on the node that the placement names."""

    def __init__(self, placement: Placement, *, wait_s: float) -> None:
        """`PlacementError` when Ray does not reserve everything within `wait_s`."""
        import ray

        self._placement = placement
        bundles = [{"CPU": b.cpus} | ({"GPU": b.gpus} if b.gpus else {}) for b in placement.bundles]
        # Ray's own cluster of one node has one place for everything.
        labels = [{NODE_LABEL: bundle.node} for bundle in placement.bundles]
        selector = labels if len(placement.cluster.nodes) > 1 else None
        self._group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=selector)
        if not self._group.wait(wait_s):
            self.give_back()
            raise PlacementError(
                f"Ray did not reserve {len(bundles)} places ({_total(placement)}) within {wait_s:g} s: others took them "
                "meanwhile; run the same command again"
            )

    def actor(self, kind: type, device: Device) -> Any:
        """`kind` as an actor class bound to a device: `.remote(...)` starts it there."""
        import ray

        # A dead actor is not restarted behind the loop's back: its state would be of another step.
        return ray.remote(kind).options(
            num_cpus=1,
            num_gpus=self._placement.gpu_share(device),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=self._strategy(device.bundle),
        )

    def task(self, function: Any, bundle: int) -> Any:
        """`function` as a task on the node of a bundle, which takes nothing of it."""
        import ray

        return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=self._strategy(bundle))

    def give_back(self) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)

    def _strategy(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)


def _total(placement: Placement) -> str:
    bundles = placement.bundles
    return f"{sum(b.cpus for b in bundles)} CPUs, {sum(b.gpus for b in bundles)} GPUs"
