"""From a micro-batch's logits to the policy's loss and metrics: fused into one visit of each row, or step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from miles.algos.collectives import group_size
from miles.algos.fusable import why_not_fused
from miles.algos.metrics import MetricSums
from miles.algos.objective import step_objective
from miles.data.tensors import BatchTensors
from miles.train.errors import TrainError
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.scoring import Scorer

FusedMode = Literal["auto", "on", "off"]


def choose_fused(mode: FusedMode, *, on_gpu: bool, reason: str | None) -> bool:
    """Whether to fuse; `reason` is why it cannot be, or None. `TrainError` where it must be and cannot."""
    if mode == "on" and reason is not None:
        raise TrainError(f"train.fused_loss is on but {reason}; use train.fused_loss=auto")
    return reason is None and (mode == "on" or (mode == "auto" and on_gpu))


@dataclass(frozen=True)
class PolicyObjective:
    """`fused`: auto fuses on a GPU where it can (the CPU keeps one arithmetic with the engine, bit for bit), on wherever
    it is and fails where it cannot, off never. Both ways give the same loss, gradient and metrics up to rounding."""

    scorer: Scorer
    fused: FusedMode

    def __call__(self, item: ModelInput, logits: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
        if self._fuses(item.tensors, logits):
            return self._in_one_visit(item, logits)
        scores = self.scorer.for_training(item, logits)
        return step_objective(
            scores.log_probs,
            item.tensors,
            self.scorer.algo,
            entropy=scores.entropy,
            support_mass=scores.support_mass,
            kl_exact=scores.kl_exact,
            cp_group=self._context_group,
        )

    def _fuses(self, tensors: BatchTensors, logits: torch.Tensor) -> bool:
        algo = self.scorer.algo
        reason = why_not_fused(
            algo,
            tensor_parallel=group_size(self.scorer.mesh.tp),
            on_policy=tensors.old_log_probs is None and not algo.correction.bypass,
            on_support=tensors.support_ids is not None,
        )
        return choose_fused(self.fused, on_gpu=logits.is_cuda, reason=reason)

    def _in_one_visit(self, item: ModelInput, logits: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
        from miles.algos.fused import fused_objective

        # Rows that repeat (a prompt shared by several answers) are copied, so that their gradients add up.
        rows = None if item.rows_repeat else item.tensors.logit_index
        return fused_objective(
            item.response_rows(logits) if item.rows_repeat else logits,
            item.tensors,
            self.scorer.algo,
            rows=rows,
            vocab_size=self.scorer.vocab_size,
            temperature=self.scorer.temperature,
            cp_group=self._context_group,
            # Nothing reads the logits after their loss: the gradient takes their memory.
            inplace=True,
        )

    @property
    def _context_group(self) -> dist.ProcessGroup | None:
        mesh = self.scorer.mesh
        return mesh.cp if mesh.layout.cp_size > 1 else None
