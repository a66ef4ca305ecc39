"""From a micro-batch to the model's forward, and from its output to the rows that predict response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from miles.algos.context import ContiguousAllGather, Zigzag, localize
from miles.data.batch import MicroBatch
from miles.data.tensors import BatchTensors, to_tensors
from miles.train.config import ParallelConfig
from miles.train.errors import TrainError
from miles.train.megatron.documents import DocumentLayout
from miles.train.megatron.mesh import Mesh
from miles.train.megatron.shared_prompts import share_prompts


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One micro-batch (or this context-parallel rank's slice of it) on the device. `layout` is None for rows (`bshd`).

    `token_index` int64: which of the whole micro-batch's response tokens are here; None means all of them.
    `support_index` and `whole_support`: the same for the ids of the sampler's supports.
    `rows_repeat`: several response tokens are predicted by one position (samples that share a prompt).
    """

    tensors: BatchTensors
    layout: DocumentLayout | None
    whole_tokens: int
    token_index: torch.Tensor | None = None
    rows_repeat: bool = False
    whole_support: int = 0
    support_index: torch.Tensor | None = None

    def run(self, model: Any) -> torch.Tensor:
        """Forward; on the last pipeline stage logits or values `[rows, T, width]`, else hidden states."""
        return model(self.tensors.input_ids, self.tensors.position_ids, None, packed_seq_params=self.layout)

    def count(self, per: Literal["token", "support"]) -> int:
        """Response tokens here, or ids of their supports."""
        found = self.tensors.target_ids if per == "token" else self.tensors.support_ids
        return 0 if found is None else len(found)

    def places(self, per: Literal["token", "support"]) -> tuple[int, torch.Tensor | None]:
        """(number in the whole micro-batch, which of them are here or None for all)."""
        if per == "token":
            return self.whole_tokens, self.token_index
        return self.whole_support, self.support_index

    def response_rows(self, plane: torch.Tensor) -> torch.Tensor:
        """A copy `[n, width]` of the plane's rows that predict the n response tokens."""
        return plane.index_select(0, self.tensors.logit_index)


def to_inputs(
    micro_batches: Sequence[MicroBatch],
    parallel: ParallelConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    vocab_size: int,
    share: bool = False,
) -> list[ModelInput]:
    """Move micro-batches to the device, cut for this context-parallel rank. A token outside the vocabulary is an error.

    `share`: compute each distinct prompt once (not under context parallelism, where a slice has few whole prompts).
    """
    for batch in micro_batches:
        low, high = int(batch.input_ids.min()), int(batch.input_ids.max())
        if low < 0 or high >= vocab_size:
            raise TrainError(
                f"a micro-batch holds token id {high if high >= vocab_size else low}, but the model's vocabulary has "
                f"{vocab_size} tokens; the tokenizer and the model folder do not belong together"
            )
    multiple = parallel.tp if parallel.sp else 1
    if parallel.cp > 1:
        kind = Zigzag if parallel.cp_layout == "zigzag" else ContiguousAllGather
        context = kind(size=parallel.cp, rank=mesh.layout.cp_rank, multiple=multiple)
        return [_slice(batch, context, mesh, device) for batch in micro_batches]
    inputs = []
    for batch in micro_batches:
        length = batch.input_ids.shape[1]
        if length % multiple:
            raise TrainError(
                f"a micro-batch row has {length} tokens, which tp={multiple} with sequence parallel does not "
                f"divide; build the batch with layout.pad_multiple={multiple}"
            )
        tensors = to_tensors(batch, device)
        shared = share_prompts(batch, tensors, device, multiple=multiple) if share else None
        if shared is not None:
            inputs.append(ModelInput(*shared, len(batch.target_ids), rows_repeat=True))
            continue
        layout = DocumentLayout.from_lengths(tensors.bounds.lengths, device) if tensors.bounds is not None else None
        inputs.append(ModelInput(tensors, layout, len(batch.target_ids)))
    return inputs


def _slice(batch: MicroBatch, context: Zigzag | ContiguousAllGather, mesh: Mesh, device: torch.device) -> ModelInput:
    """Rows become one packed row of documents: under context parallelism both layouts attend the same way."""
    part = localize(batch, context)  # type: ignore[arg-type]  # frozen against a protocol of plain attributes
    cut = part.micro_batch
    starts = np.cumsum(batch.token_counts) - batch.token_counts
    index = starts[cut.sequence] + cut.response_index
    tensors = to_tensors(cut, device)
    flat = {name: getattr(tensors, name).reshape(1, -1) for name in ("input_ids", "position_ids")}
    return ModelInput(
        replace(tensors, **flat),
        DocumentLayout.from_slice(part, device, mesh.cp),
        len(batch.target_ids),
        torch.from_numpy(index).to(device),
        whole_support=0 if batch.support is None else len(batch.support.ids),
        support_index=None if batch.support is None else torch.from_numpy(batch.support.places(index)).to(device),
    )
