"""From response logits to log-probs, entropy and support mass, on vocabulary-parallel logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from miles.algos.config import AlgoConfig
from miles.algos.logprobs import vocab_parallel_scores
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.mesh import Mesh


@dataclass(frozen=True)
class Scores:
    """fp32 [n] each. `support_mass`: share of the full softmax on the sampler's support, when the batch carries one."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    support_mass: torch.Tensor | None = None


@dataclass(frozen=True)
class Scorer:
    """Takes the logits of all positions `[T, V/tp]`. `temperature` is the rollout's."""

    mesh: Mesh
    algo: AlgoConfig
    vocab_size: int
    temperature: float

    def for_training(self, item: ModelInput, logits: torch.Tensor) -> Scores:
        """Log-probs with gradient, and the entropy of the full vocabulary (with gradient where the loss has it)."""
        return self._score(item, logits, entropy="gradient" if self.algo.entropy_coef > 0 else "value")

    def log_probs(self, item: ModelInput, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [n]; on the sampler's support when the batch carries one."""
        return self._score(item, logits, entropy="none").log_probs

    def _score(self, item: ModelInput, logits: torch.Tensor, *, entropy: str) -> Scores:
        tensors = item.tensors
        shared: dict[str, Any] = {"vocab_size": self.vocab_size, "group": self.mesh.tp, "temperature": self.temperature}
        # The kernel writes each row's gradient once; rows that repeat must be copied, so that theirs add up.
        rows = None if item.rows_repeat else tensors.logit_index
        plane = item.response_rows(logits) if item.rows_repeat else logits
        full, entropies = vocab_parallel_scores(plane, tensors.target_ids, rows=rows, entropy=entropy, **shared)
        if tensors.support_ids is None or tensors.support_offsets is None:
            return Scores(full, entropies)
        from miles.algos.sampling_mask import support_log_probs

        supported = support_log_probs(
            item.response_rows(logits), tensors.target_ids, tensors.support_ids, tensors.support_offsets, **shared
        ).log_probs
        # log p_full(y) - log p_S(y) = log of the mass of S, the same for every y in S.
        return Scores(supported, entropies, (full - supported).detach().exp())
