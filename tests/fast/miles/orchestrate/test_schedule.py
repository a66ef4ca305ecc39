"""The loop's schedule knows of the mesh everything that pads a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from miles.orchestrate.loop import TrainingLoop
from miles.recipe.schema import Recipe


def test_the_schedule_counts_what_context_and_sequence_parallelism_pad(recipe: Callable[..., Recipe]) -> None:
    nothing = cast(Any, None)
    for kind in ("zigzag", "contiguous"):
        made = recipe(train={"parallel": {"tp": 2, "sp": True, "cp": 3, "cp_layout": kind}})
        schedule = TrainingLoop(made, nothing, nothing, nothing, 0, nothing, nothing).schedule()
        assert (schedule.context_parallel, schedule.context_layout, schedule.pad_multiple) == (3, kind, 2)
