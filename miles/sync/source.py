"""What the trainer offers, checked against the plan tensor by tensor while it streams by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from miles.sync.entry import SourceSpec
from miles.sync.errors import PlanError, SourceError
from miles.sync.plan import SyncPlan
from miles.weight_wire.bucket import dtype_name

Weights = Iterable[tuple[str, torch.Tensor]]


def weight_map_of(weights: list[tuple[str, torch.Tensor]]) -> dict[str, SourceSpec]:
    """Name -> shape and dtype; `PlanError` for a name that comes twice."""
    weight_map = {name: SourceSpec(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in weights}
    if len(weight_map) != len(weights):
        raise PlanError("the trainer offered the same weight name twice")
    return weight_map


def checked(weights: Weights, plan: SyncPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor, detached, once it is known to be planned, new, of the planned shape and dtype, and finite.

    After the last one every planned name must have come. `SourceError` names the parameter.
    """
    left = set(plan.by_source)
    for name, tensor in weights:
        entries = plan.by_source.get(name)
        if entries is None:
            raise SourceError(f"{name} is not in the plan {plan.digest[:12]}: the trainer's weight names changed")
        if name not in left:
            raise SourceError(f"{name} was offered twice in one sync")
        source = entries[0].source
        if tuple(tensor.shape) != source.shape or dtype_name(tensor.dtype) != source.dtype:
            raise SourceError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} offered, {list(source.shape)} {source.dtype} planned"
            )
        bad = count_not_finite(tensor)
        if bad:
            raise SourceError(
                f"{name}: {bad} of {tensor.numel()} values are not finite; nothing is served from this sync"
            )
        left.discard(name)
        yield name, tensor.detach()
    if left:
        shown = ", ".join(sorted(left)[:20])
        raise SourceError(f"the trainer offered no tensor for {len(left)} planned weights: {shown}")


def count_not_finite(tensor: torch.Tensor) -> int:
    """How many values are NaN or infinite. One such value makes the sum so; only then are all looked at."""
    if not tensor.is_floating_point() or math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())
