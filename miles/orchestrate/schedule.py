"""The data-parallel schedule of a recipe: what its mesh, its sampling and its data settings say about batches."""

from __future__ import annotations

from miles.data.batch_layout import BatchLayout
from miles.data.packing import FlopsShape
from miles.data.schedule import ScheduleConfig
from miles.recipe import Recipe


def batch_layout(recipe: Recipe, *, pad_id: int) -> BatchLayout:
    """The one layout of all batches of a run, of scoring passes and of optimizer steps."""
    parallel = recipe.train.parallel
    return BatchLayout(
        recipe.data.layout,
        pad_id=pad_id,
        # Sequence parallelism cuts rows over the tensor-parallel ranks.
        pad_multiple=parallel.tp if parallel.sp else 1,
        context_parallel=parallel.cp,
        context_layout=parallel.cp_layout,
        # Score on the sampler's support: sampling cuts the distribution, and the recipe does not say otherwise.
        use_support=recipe.rollout.needs_sampling_mask and recipe.algo.support_log_probs == "auto",
    )


def schedule_config(recipe: Recipe, *, pad_id: int, flops: FlopsShape | None) -> ScheduleConfig:
    """`flops`: what balancing by FLOPs needs to know of the model."""
    data, parallel = recipe.data, recipe.train.parallel
    return ScheduleConfig(
        layout=batch_layout(recipe, pad_id=pad_id),
        data_parallel=parallel.dp,
        max_tokens_per_gpu=data.max_tokens_per_gpu,
        # Interleaved pipelines take micro-batches in groups of the stages.
        micro_batch_multiple=parallel.pp if parallel.vpp else 1,
        balance=data.balance,
        partial_step=data.partial_step,
        flops=flops,
        global_batch_size=data.global_batch_size,
    )
