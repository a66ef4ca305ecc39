"""Which scores an algorithm needs of its samples before it can be trained, how they are got and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles.algos.step_batches import gather_scores
from miles.data.batch import TrainBatch
from miles.data.sample import Sample
from miles.orchestrate.actor_group import ActorGroup
from miles.recipe import Recipe
from miles.train.backend import ScoreModel, ScoreOutput


@dataclass(frozen=True, slots=True)
class NeededScore:
    """One pass over the samples. `field`: of `Sample`; log-probs on the support go into its sampling mask instead."""

    model: ScoreModel
    output: ScoreOutput
    field: str | None


def scores_needed(recipe: Recipe) -> list[NeededScore]:
    """The passes before a step, in order."""
    algo = recipe.algo
    needed: list[NeededScore] = []
    # After the first of several optimizer steps the policy is no longer the one that the ratio is taken to.
    ratios = algo.declared_loss.advantages and recipe.several_steps and not algo.correction.bypass
    if algo.needs_old_log_probs or ratios:
        needed.append(NeededScore("policy", "log_probs", "old_log_probs"))
    if algo.needs_reference_support:
        needed.append(NeededScore("reference", "support", None))
    elif algo.needs_reference:
        needed.append(NeededScore("reference", "log_probs", "ref_log_probs"))
    if algo.needs_teacher:
        needed.append(NeededScore("teacher", "log_probs", "teacher_log_probs"))
    if algo.needs_values:
        needed.append(NeededScore("critic", "values", "values"))
    return needed


async def score_batch(
    batch: TrainBatch, count: int, actors: ActorGroup, model: ScoreModel, output: ScoreOutput
) -> list[np.ndarray]:
    """What `model` says of each of the `count` samples of `prepare_scoring`'s batch, float32 [R]: one pass over the
    trainer's ranks."""
    arguments = [(batch.for_rank(dp_rank), model, output) for dp_rank in actors.dp_ranks]
    results = dict(zip(actors.dp_ranks, await actors.on_workers("score", arguments), strict=True))
    by_rank = [results[dp_rank] for dp_rank in range(len(batch.ranks))]
    return gather_scores(batch, by_rank, count)


def put_scores(samples: Sequence[Sample], needed: NeededScore, scores: Sequence[np.ndarray]) -> None:
    """Write one array for each sample to where the algorithm looks for it."""
    for sample, values in zip(samples, scores, strict=True):
        if needed.field is not None:
            setattr(sample, needed.field, values)
        # A sample without a response has no mask.
        elif sample.sampling_mask is not None:
            sample.sampling_mask = sample.sampling_mask.with_ref_log_probs(values)
