"""One micro-batch on a device: the tensors a training backend and the objective read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles.data.batch import OPTIONAL_FIELDS, MicroBatch
from miles.data.packing import PackedBounds


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """`MicroBatch` as tensors; n response tokens, S sequences. `bounds` is set for layout thd only;
    `token_counts` int64 [S] are the runs of `sequence`.

    `mask` is bool [n]; `support_ids` int64 [E], `support_offsets` int64 [n+1] when the sampler's support is known,
    `support_ref_log_probs` float32 [E] when the reference policy was scored on it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    bounds: PackedBounds | None
    logit_index: torch.Tensor
    sequence: torch.Tensor
    token_counts: torch.Tensor
    sample_ids: tuple[str, ...]
    response_index: torch.Tensor
    target_ids: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    support_ids: torch.Tensor | None = None
    support_offsets: torch.Tensor | None = None
    support_ref_log_probs: torch.Tensor | None = None


def to_tensors(micro_batch: MicroBatch, device: torch.device | str = "cpu") -> BatchTensors:
    """Copy to `device`; on the CPU the tensors share memory with the arrays (never written by the objective)."""

    def move(array: np.ndarray | None) -> torch.Tensor | None:
        if array is None:
            return None
        # Arrays that come out of an object store are read-only; torch warns about aliasing those.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.to(device, non_blocking=True)

    bounds = None
    if micro_batch.layout.kind == "thd":
        bounds = PackedBounds.from_lengths(micro_batch.document_lengths, pad_from=micro_batch.pad_from, device=device)
    required = ("input_ids", "position_ids", "logit_index", "sequence", "response_index", "target_ids")
    flat = ("weights", "advantages", "returns", *OPTIONAL_FIELDS)
    support = micro_batch.support
    return BatchTensors(
        bounds=bounds,
        token_counts=torch.from_numpy(micro_batch.token_counts).to(device),
        sample_ids=micro_batch.sample_ids,
        mask=torch.from_numpy(micro_batch.mask.astype(bool)).to(device),
        support_ids=None if support is None else move(support.ids.astype(np.int64)),
        support_offsets=None if support is None else move(support.offsets),
        support_ref_log_probs=None if support is None else move(support.ref_log_probs),
        **{name: move(getattr(micro_batch, name)) for name in (*required, *flat)},  # type: ignore[arg-type]
    )
