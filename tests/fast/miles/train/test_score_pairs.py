"""Every pair of model and output is either scored or refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from miles.train.backend import SCORES, ScoreModel, ScoreOutput, check_score
from miles.train.errors import TrainError


@pytest.mark.parametrize(("model", "output"), list(product(get_args(ScoreModel), get_args(ScoreOutput))))
def test_language_models_score_tokens_and_critics_give_values(model: Any, output: Any) -> None:
    if (output == "values") == (model == "critic"):
        check_score(model, output)
        return
    with pytest.raises(TrainError, match=rf"the {model} gives .*, not '{output}'; ask .* for it"):
        check_score(model, output)


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(TrainError, match=r"no model 'referee'; choose policy, reference, teacher, critic"):
        check_score("referee", "log_probs")
    with pytest.raises(TrainError, match=r"not 'logits'; there is no such output"):
        check_score("policy", "logits")


def test_the_table_has_every_model_and_every_output() -> None:
    assert tuple(SCORES) == get_args(ScoreModel)
    assert {output for outputs in SCORES.values() for output in outputs} == set(get_args(ScoreOutput))
