"""From response logits to log-probs, entropy and support mass, on vocabulary-parallel logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.algos.config import AlgoConfig
from miles.algos.logprobs import vocab_parallel_entropy, vocab_parallel_log_probs
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.mesh import Mesh


@dataclass(frozen=True)
class Scorer:
    """`temperature` is the rollout's. Entropy is computed only where the objective or a metric needs it."""

    mesh: Mesh
    algo: AlgoConfig
    vocab_size: int
    temperature: float

    def log_probs(self, item: ModelInput, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [n]; on the sampler's support when the batch carries one."""
        tensors = item.tensors
        if tensors.support_ids is not None and tensors.support_offsets is not None:
            from miles.algos.sampling_mask import support_log_probs

            return support_log_probs(
                logits,
                tensors.target_ids,
                tensors.support_ids,
                tensors.support_offsets,
                group=self.mesh.tp,
                vocab_size=self.vocab_size,
                temperature=self.temperature,
            )
        return vocab_parallel_log_probs(
            logits, tensors.target_ids, group=self.mesh.tp, vocab_size=self.vocab_size, temperature=self.temperature
        )

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [n] over the full vocabulary."""
        return vocab_parallel_entropy(
            logits, group=self.mesh.tp, vocab_size=self.vocab_size, temperature=self.temperature
        )
