"""The seam between the training loop and a training backend.

One backend object lives in each rank's process; every method is collective over the backend's mesh unless it
says otherwise. The loop knows token ids, batches and Hugging Face (HF) tensor names, never megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from miles.train.errors import TrainError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.data.batch import RankBatch
    from miles.quant.contract import QuantContract
    from miles.train.checkpoint import Skipped


ScoreModel = Literal["policy", "reference", "teacher", "critic"]
ScoreOutput = Literal["log_probs", "support", "values"]
# What each model has to say: language models of tokens, a critic of rewards to come.
SCORES: dict[ScoreModel, tuple[ScoreOutput, ...]] = {
    "policy": ("log_probs", "support"),
    "reference": ("log_probs", "support"),
    "teacher": ("log_probs", "support"),
    "critic": ("values",),
}


def check_score(model: str, output: str) -> None:
    """`TrainError` for a pair that no backend can score."""
    offered = {str(name): outputs for name, outputs in SCORES.items()}
    if model not in offered:
        raise TrainError(f"score: there is no model {model!r}; choose {', '.join(offered)}")
    if output not in offered[model]:
        able = [name for name, outputs in offered.items() if output in outputs]
        hint = f"ask {' or '.join(able)} for it" if able else "there is no such output"
        raise TrainError(f"score: the {model} gives {' or '.join(offered[model])}, not {output!r}; {hint}")


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's place in the mesh. `is_sync_rank`: this rank yields from `state_for_sync`."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    pp_size: int
    cp_rank: int
    cp_size: int
    ep_rank: int

    @property
    def is_sync_rank(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Resumed:
    """What `load_checkpoint` found: the loop's own state, the step it was saved at, and what was passed over."""

    extra: dict[str, Any]
    step: int
    path: Path
    skipped: tuple[Skipped, ...]


class ChunkHook(Protocol):
    """What may change a model chunk before it trains (fake quantisation), and say so in checkpoints and exports."""

    def __call__(self, chunk: torch.nn.Module, hf_names: Callable[[str], Iterable[str]]) -> None:
        """Called with each policy chunk before its gradient buffers exist; `hf_names(parameter)`: its HF names."""

    def contract(self, hf_names: Iterable[str]) -> QuantContract | None:
        """How a model with these HF names is rounded in training; None when it is not."""


@runtime_checkable
class Backend(Protocol):
    """What the training loop needs of a backend."""

    @property
    def parallel_layout(self) -> ParallelLayout: ...

    def init(self) -> None:
        """Join the mesh and build the model and optimizer; no weights yet."""

    def load(self, hf_dir: Path) -> None:
        """Load weights from an HF folder; the optimizer starts fresh."""

    def step(self, batch: RankBatch) -> dict[str, float]:
        """Forward, backward, clip, optimizer step. Metrics are global and equal on every rank."""

    def score(self, batch: RankBatch, *, model: ScoreModel, output: ScoreOutput) -> list[np.ndarray]:
        """Float32 per sample, in the batch's sample order, without dummies; equal on all ranks of one `dp_rank`.

        log_probs: [R] of the response; on the sampler's support when the batch carries one. support: one per id of the
        sample's sampling mask, normalised on each token's support. values: [R], the critic's before each token.
        policy: the current weights; reference: those that the run started from. A pair that `SCORES` lacks, or a model
        that the algorithm did not ask for, is a `TrainError`.
        """

    def save(self, directory: Path, *, extra: dict[str, Any]) -> Path:
        """Write an atomic checkpoint below `directory`; `extra` is JSON (data cursor, weight version, recipe)."""

    def load_checkpoint(self, directory: Path) -> Resumed | None:
        """Load the newest complete checkpoint that verifies; None when there is none."""

    def state_for_sync(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and full tensors, in one fixed order; yields on the sync rank only. Valid until the next step."""

    def export_hf(self, directory: Path) -> None:
        """Write an HF folder (atomic), with config and tokenizer."""

    def sleep(self) -> None:
        """Give device memory back while engines generate."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def identity(self) -> dict[str, Any]:
        """What must be equal for a step to repeat bit for bit: mesh, device, versions."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the mesh."""
