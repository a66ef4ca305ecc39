"""The schedule knows of the mesh everything that pads a micro-batch, and the layout is said in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from miles.data.batch_layout import BatchLayout
from miles.orchestrate.schedule import schedule_config
from miles.recipe.schema import Recipe


def test_the_schedule_counts_what_context_and_sequence_parallelism_pad(recipe: Callable[..., Recipe]) -> None:
    for kind in ("zigzag", "contiguous"):
        made = recipe(train={"parallel": {"tp": 2, "sp": True, "cp": 3, "cp_layout": kind}}, data={"layout": "bshd"})
        layout = schedule_config(made, pad_id=7, flops=None).layout
        assert layout == BatchLayout("bshd", 7, pad_multiple=2, context_parallel=3, context_layout=kind)  # type: ignore[arg-type]


def test_without_sequence_parallelism_tensor_parallel_ranks_need_no_padding(recipe: Callable[..., Recipe]) -> None:
    assert schedule_config(recipe(train={"parallel": {"tp": 2}}), pad_id=0, flops=None).layout.pad_multiple == 1


@pytest.mark.parametrize(
    ("rollout", "algo", "expected"),
    [({}, {}, False), ({"top_p": 0.9}, {}, True), ({"top_p": 0.9}, {"support_log_probs": "off"}, False)],
)
def test_sampling_masks_are_taken_where_sampling_cuts(recipe: Callable[..., Recipe], rollout, algo, expected) -> None:  # type: ignore[no-untyped-def]
    assert schedule_config(recipe(rollout=rollout, algo=algo), pad_id=0, flops=None).layout.use_support is expected


def test_interleaved_pipelines_take_groups_of_micro_batches(recipe: Callable[..., Recipe]) -> None:
    for parallel, multiple in (({"pp": 2}, 1), ({"pp": 2, "vpp": 2}, 2)):
        assert (
            schedule_config(recipe(train={"parallel": parallel}), pad_id=0, flops=None).micro_batch_multiple == multiple
        )
