"""From response logits to log-probs, entropy and support mass, on vocabulary-parallel logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from miles.algos.config import AlgoConfig
from miles.algos.kl import support_exact
from miles.algos.log_probs import vocab_parallel_scores
from miles.train.backend import ScoreOutput
from miles.train.errors import TrainError
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.mesh import Mesh


@dataclass(frozen=True)
class Scores:
    """fp32 [n] each. `support_mass`: share of the full softmax on the sampler's support, when the batch carries one;
    `kl_exact`: KL to the reference on it, with gradient, when the loss has it."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    support_mass: torch.Tensor | None = None
    kl_exact: torch.Tensor | None = None


@dataclass(frozen=True)
class Scorer:
    """Takes the logits of all positions `[T, V/tp]`. `temperature` is the rollout's."""

    mesh: Mesh
    algo: AlgoConfig
    vocab_size: int
    temperature: float

    def for_training(self, item: ModelInput, logits: torch.Tensor) -> Scores:
        """Log-probs with gradient, and the entropy of the full vocabulary (with gradient where the loss has it)."""
        return self._score(item, logits, entropy="gradient" if self.algo.entropy_coef > 0 else "value", exact=True)

    def log_probs(self, item: ModelInput, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [n]; on the sampler's support when the batch carries one."""
        return self._score(item, logits, entropy="none").log_probs

    def support_log_probs(self, item: ModelInput, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [E]: log-prob of every id of the batch's supports, normalised on its support."""
        tensors = item.tensors
        if tensors.support_ids is None or tensors.support_offsets is None:
            raise TrainError("support log-probs were asked for, but the batch carries no sampling masks")
        from miles.algos.sampling_mask import support_log_softmax

        return support_log_softmax(
            item.response_rows(logits),
            tensors.support_ids,
            tensors.support_offsets,
            group=self.mesh.tp,
            temperature=self.temperature,
        )

    def values(self, item: ModelInput, plane: torch.Tensor) -> torch.Tensor:
        """fp32 [n]: a critic's value before each response token."""
        return item.response_rows(plane)[:, 0].float()

    def reader(self, output: ScoreOutput) -> Callable[[ModelInput, torch.Tensor], torch.Tensor]:
        """What takes `output` from a model's output plane."""
        return {"log_probs": self.log_probs, "support": self.support_log_probs, "values": self.values}[output]

    def _score(self, item: ModelInput, logits: torch.Tensor, *, entropy: str, exact: bool = False) -> Scores:
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
        )
        # log p_full(y) - log p_S(y) = log of the mass of S, the same for every y in S.
        mass = (full - supported).detach().exp()
        return Scores(supported, entropies, mass, self._exact_kl(item, logits) if exact else None)

    def _exact_kl(self, item: ModelInput, logits: torch.Tensor) -> torch.Tensor | None:
        reference, offsets = item.tensors.support_ref_log_probs, item.tensors.support_offsets
        if not self.algo.needs_reference_support or reference is None or offsets is None:
            return None
        return support_exact(self.support_log_probs(item, logits), reference, offsets)
