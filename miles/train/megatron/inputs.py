"""From a micro-batch to the model's forward, and from its output to the rows that predict response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from miles.data.batch import MicroBatch
from miles.data.tensors import BatchTensors, to_tensors
from miles.train.errors import TrainError
from miles.train.megatron.documents import DocumentLayout


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One micro-batch on the device. `layout` is None for rows (`bshd`)."""

    tensors: BatchTensors
    layout: DocumentLayout | None

    def run(self, model: Any) -> torch.Tensor:
        """Forward; on the last pipeline stage vocabulary-parallel logits `[rows, T, V/tp]`, else hidden states."""
        return model(self.tensors.input_ids, self.tensors.position_ids, None, packed_seq_params=self.layout)

    def response_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V/tp]` of the positions that predict the n response tokens."""
        return logits.flatten(0, 1).index_select(0, self.tensors.logit_index)


def to_inputs(micro_batches: Sequence[MicroBatch], device: torch.device, *, sequence_multiple: int) -> list[ModelInput]:
    """Move micro-batches to the device. `sequence_multiple`: tensor-parallel size under sequence parallelism."""
    inputs = []
    for batch in micro_batches:
        length = batch.input_ids.shape[1]
        if length % sequence_multiple:
            raise TrainError(
                f"a micro-batch row has {length} tokens, which tp={sequence_multiple} with sequence parallel does not "
                f"divide; build the batch with pad_multiple={sequence_multiple}"
            )
        tensors = to_tensors(batch, device)
        layout = DocumentLayout.from_lengths(tensors.bounds.lengths, device) if tensors.bounds is not None else None
        inputs.append(ModelInput(tensors, layout))
    return inputs
