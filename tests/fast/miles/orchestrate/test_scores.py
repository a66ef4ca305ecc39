"""Which passes over the samples an algorithm asks for, and where their results go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles.data.sample import Sample
from miles.data.sampling_mask import RolloutSamplingMask
from miles.orchestrate.scores import NeededScore, put_scores, scores_needed
from miles.recipe.schema import Recipe
from miles.train.backend import check_score

Make = Callable[..., Recipe]
OLD = ("policy", "log_probs", "old_log_probs")
REFERENCE = ("reference", "log_probs", "ref_log_probs")
VALUES = ("critic", "values", "values")


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ({}, []),
        ({"kl": {"where": "loss", "estimator": "k2", "coef": 0.1}}, [REFERENCE]),
        ({"kl": {"where": "loss", "estimator": "support_exact", "coef": 0.1}}, [("reference", "support", None)]),
        ({"advantage": "gae", "kl": {"where": "reward", "coef": 0.1}}, [OLD, REFERENCE, VALUES]),
        (
            {"advantage": "gae", "kl": {"where": "reward", "coef": 0.1}, "correction": {"bypass": True}},
            [REFERENCE, VALUES],
        ),
        ({"opd_coef": 1.0, "teacher": "folder"}, [("teacher", "log_probs", "teacher_log_probs")]),
    ],
)
def test_an_algorithm_names_its_passes_in_order(recipe: Make, algo: dict[str, Any], expected: list[Any]) -> None:
    needed = scores_needed(recipe(algo=algo))
    assert [(score.model, score.output, score.field) for score in needed] == expected
    for score in needed:
        check_score(score.model, score.output)


def test_several_optimizer_steps_keep_the_policy_they_began_with(recipe: Make) -> None:
    sizes = {"rollout": {"batch_groups": 2, "group_size": 4}, "data": {"global_batch_size": 4}}
    assert scores_needed(recipe(**sizes)) == [NeededScore(*OLD)]  # type: ignore[arg-type]
    assert scores_needed(recipe(**sizes, algo={"correction": {"bypass": True}})) == []


def sample(tokens: int) -> Sample:
    made = Sample("s", 0, 0, tokens=np.arange(2, 4 + tokens), prompt_length=2)
    if tokens:
        made.sampling_mask = RolloutSamplingMask.singletons(made.tokens[2:], vocab_size=16)
    return made


def test_scores_go_into_their_field_or_into_the_sampling_mask() -> None:
    samples, scores = [sample(2), sample(0)], [np.array([-1.0, -2.0], np.float32), np.zeros(0, np.float32)]
    put_scores(samples, NeededScore("reference", "log_probs", "ref_log_probs"), scores)
    assert [s.ref_log_probs is scores[i] for i, s in enumerate(samples)] == [True, True]
    put_scores(samples, NeededScore("reference", "support", None), [np.zeros(2, np.float32), scores[1]])
    mask = samples[0].sampling_mask
    assert mask is not None
    assert mask.ref_log_probs is not None
    assert mask.ref_log_probs.tolist() == [0.0, 0.0]
    assert samples[1].sampling_mask is None
    with pytest.raises(ValueError, match="shorter"):
        put_scores(samples, NeededScore("reference", "log_probs", "ref_log_probs"), scores[:1])
