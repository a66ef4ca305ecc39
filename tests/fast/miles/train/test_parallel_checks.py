"""Impossible parallel layouts and options are refused before any process starts, with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from miles.models.family import FamilyConfig
from miles.models.rope import RopeSpec
from miles.train.config import OptimizerConfig, ParallelConfig
from miles.train.errors import ParallelismError
from miles.train.parallel_checks import check_parallelism

DENSE = FamilyConfig(
    family="qwen3",
    num_layers=6,
    hidden_size=64,
    ffn_hidden_size=96,
    heads=8,
    groups=4,
    head_dim=8,
    vocab_size=15,
    max_positions=64,
    norm_eps=1e-6,
    tied=False,
    rope=RopeSpec("plain", 1e4, 8),
)
MOE = replace(DENSE, num_experts=6, experts_per_token=2, transformer={"moe_ffn_hidden_size": 48})
TABLE = [
    (DENSE, {"tp": 3}, "tp=3 does not divide the model's 8 attention heads"),
    (DENSE, {"tp": 8}, "tp=8 does not divide the model's 4 key/value groups"),
    (DENSE, {"pp": 4}, "pp=4 does not divide the model's 6 layers"),
    (DENSE, {"pp": 2, "vpp": 2}, "pp=2 with vpp=2 does not divide the model's 6 layers"),
    (DENSE, {"pp": 3, "last_pp_layers": 3}, "leaves 3 of 6 layers for 2 stages"),
    (DENSE, {"ep": 2, "dp": 2}, "ep=2 but the model has no experts"),
    (MOE, {"ep": 4, "dp": 4}, "ep=4 does not divide the model's 6 experts"),
    (MOE, {"tp": 2}, "sp=false with tp=2"),
    (MOE, {"tp": 4, "sp": True, "etp": 4}, None),
]


@pytest.mark.parametrize(("model", "parallel", "message"), TABLE)
def test_checks_table(model, parallel, message):
    config = ParallelConfig(**parallel)
    if message is None:
        check_parallelism(config, model)
        return
    with pytest.raises(ParallelismError, match=message.replace("(", r"\(")):
        check_parallelism(config, model)


def test_every_problem_is_listed_at_once():
    with pytest.raises(ParallelismError) as error:
        check_parallelism(ParallelConfig(tp=3, pp=4), DENSE)
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sp": True}, "needs tp > 1"),
        ({"vpp": 2}, "vpp=2 needs pp > 1"),
        ({"last_pp_layers": 2}, "needs pp > 1"),
        ({"ep": 3, "dp": 2}, "does not divide the world size"),
        ({"tp": 0}, "greater than or equal to 1"),
    ],
)
def test_sizes_that_contradict_each_other(values, message):
    with pytest.raises(ValidationError, match=message):
        ParallelConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decay": "cosine"}, "needs decay_steps"),
        ({"decay": "linear", "decay_steps": 5, "warmup_steps": 5}, "must exceed warmup_steps"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "must not exceed lr"),
    ],
)
def test_schedules_that_make_no_sense(values, message):
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**values)
