"""Forward and backward over the micro-batches of one step, and the gradient's way over the mesh.

Losses are sums that already carry their denominators, so nothing here averages: megatron-core is told
`calculate_per_token_loss` and its division is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from miles.train.megatron.build import ModelChunk
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.mesh import Mesh

# (micro-batch, its response logits [n, V/tp]) -> (loss with gradient, whatever the caller collects)
LossFn = Callable[[ModelInput, torch.Tensor], tuple[torch.Tensor, Any]]


def forward_backward(
    chunks: Sequence[ModelChunk], inputs: Sequence[ModelInput], loss_fn: LossFn, mesh: Mesh
) -> list[Any]:
    """Accumulate the gradient of the summed loss into the buffers; returns what `loss_fn` collected (last stage only)."""
    for chunk in chunks:
        chunk.ddp.zero_grad_buffer()
    collected = []
    ddp = chunks[0].ddp
    for number, micro_batch in enumerate(inputs):
        with ExitStack() as stack:
            if number < len(inputs) - 1:
                stack.enter_context(ddp.no_sync())
            loss, result = loss_fn(micro_batch, micro_batch.response_rows(micro_batch.run(ddp)))
            loss.backward()
        collected.append(result)
    reduce_gradients(chunks)
    return collected


def reduce_gradients(chunks: Sequence[ModelChunk]) -> None:
    """Sum gradients over data- and context-parallel ranks, and those of replicated parameters over their shards."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([chunk.ddp for chunk in chunks], None)


@torch.no_grad()
def forward_only(chunks: Sequence[ModelChunk], inputs: Sequence[ModelInput], read: LossFn, mesh: Mesh) -> list[Any]:
    """Like `forward_backward` without gradients."""
    model = chunks[0].model
    return [read(item, item.response_rows(item.run(model)))[1] for item in inputs]
