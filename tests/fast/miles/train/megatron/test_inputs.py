"""What a micro-batch must be before a model sees it."""

from __future__ import annotations

import numpy as np
import pytest


def given(ranks, tokens, **parallel):
    import torch

    from miles.algos.config import AlgoConfig
    from miles.algos.step_batches import prepare_steps
    from miles.data.sample import Sample, Status
    from miles.data.schedule import ScheduleConfig
    from miles.train.config import ParallelConfig
    from miles.train.megatron.inputs import to_inputs

    samples = [
        Sample(f"s{i}", 0, i, np.array(row), 1, reward=float(i), status=Status.COMPLETED)
        for i, row in enumerate(tokens)
    ]
    batch = prepare_steps(samples, AlgoConfig(), ScheduleConfig()).steps[0].ranks[0]
    layout = ParallelConfig(**parallel)
    return to_inputs(batch, layout, None, torch.device("cpu"), vocab_size=15)


@pytest.mark.parametrize(("token", "named"), [(15, 15), (16, 16), (-1, -1), (2**40, 2**40)])
def test_a_token_outside_the_vocabulary_is_named_at_both_ends(token, named, ranks):
    from miles.train.errors import TrainError

    with pytest.raises(TrainError, match=rf"holds token id {named}, but the model's vocabulary has 15 tokens"):
        given(ranks, [[1, 2, 3], [1, token, 3]])


def test_the_first_and_the_last_token_of_the_vocabulary_are_in_it(ranks):
    (item,) = given(ranks, [[0, 14, 14], [14, 0, 0]])
    assert (int(item.tensors.input_ids.min()), int(item.tensors.input_ids.max())) == (0, 14)


def test_a_row_that_sequence_parallelism_does_not_divide_says_how_to_pad(ranks):
    from miles.train.errors import TrainError

    with pytest.raises(
        TrainError, match=r"7 tokens, which tp=2 .* does not divide; build the batch with layout\.pad_multiple=2"
    ):
        given(ranks, [[1, 2, 3], [1, 2, 3, 4]], tp=2, sp=True)
