"""Forward and backward over the micro-batches of one step, and the gradient's way over the mesh.

Losses are sums that already carry their denominators, so nothing here averages: megatron-core is told
`calculate_per_token_loss`, its schedules get no token count, and its division is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from miles.train.megatron.build import ModelChunk
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.mesh import Mesh

# (micro-batch, the model's output [all positions, width]) -> (loss with gradient, whatever the caller collects)
LossFn = Callable[[ModelInput, torch.Tensor], tuple[torch.Tensor, Any]]


def forward_backward(
    chunks: Sequence[ModelChunk], inputs: Sequence[ModelInput], loss_fn: LossFn, mesh: Mesh
) -> list[Any]:
    """Accumulate the gradient of the summed loss into the buffers; returns what `loss_fn` collected (last stage only)."""
    for chunk in chunks:
        chunk.ddp.zero_grad_buffer()
    if mesh.layout.pp_size > 1:
        collected = _pipelined(chunks, inputs, loss_fn, forward_only=False)
    else:
        collected = []
        for item in inputs:
            loss, result = loss_fn(item, item.run(chunks[0].ddp).flatten(0, 1))
            loss.backward()
            collected.append(result)
    reduce_gradients(chunks)
    return collected


@torch.no_grad()
def forward_only(chunks: Sequence[ModelChunk], inputs: Sequence[ModelInput], read: LossFn, mesh: Mesh) -> list[Any]:
    """Like `forward_backward` without gradients."""
    if mesh.layout.pp_size > 1:
        return _pipelined(chunks, inputs, read, forward_only=True)
    return [read(item, item.run(chunks[0].ddp).flatten(0, 1))[1] for item in inputs]


def reduce_gradients(chunks: Sequence[ModelChunk]) -> None:
    """Sum gradients over data- and context-parallel ranks, those of replicated parameters over their shards, and
    those of tied embeddings over the first and last stage."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([chunk.ddp for chunk in chunks], None)


def _pipelined(
    chunks: Sequence[ModelChunk], inputs: Sequence[ModelInput], loss_fn: LossFn, *, forward_only: bool
) -> list[Any]:
    """megatron-core's 1F1B or interleaved schedule. Gradients are reduced by the caller."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[ModelInput], model: Any) -> tuple[torch.Tensor, Any]:
        item = next(iterator)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            value, result = loss_fn(item, output.flatten(0, 1))
            return value, torch.zeros((), dtype=torch.int, device=value.device), result

        return item.run(model), loss

    iterators = [iter(inputs) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=[chunk.ddp for chunk in chunks],
        num_microbatches=len(inputs),
        # Every micro-batch announces its own shape.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
