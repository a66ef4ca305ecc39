"""A prompt that several samples answer is computed once, and nothing else changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MESHES = {"single": {}, "tp2_sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}, "dp2": {"dp": 2}}


def step(toolbox, model_dir, layout, share, **parallel):
    """Body of a rank: full gradients, metrics and scores of one step over grouped samples."""

    def body(rank, world, port):
        from miles.train.megatron import loop

        backend = toolbox.backend(model_dir, rank, world, port, share_prompts=share, **parallel)
        samples = toolbox.samples(ragged=True, response=6, prompt=7, off_policy=True, grouped=True)
        multiple = parallel["tp"] if parallel.get("sp") else 1
        batch = toolbox.batch(samples, dp=parallel.get("dp", 1), layout=layout, tokens=120, multiple=multiple)
        mine = batch.for_rank(backend.parallel_layout.dp_rank)
        inputs = backend._inputs(mine)
        loop.forward_backward(backend.policy.chunks, inputs, backend.policy_objective, backend.mesh)
        named = {item.name: item.grad.clone() for item in backend.policy.optimizer.masters}
        grads = dict(backend.policy.full_tensors.gather(named))
        computed = sum(item.tensors.input_ids.numel() for item in inputs)
        order = [int(index) for item in mine.micro_batches for index in item.sample_index if index >= 0]
        return (
            grads,
            backend.step(mine),
            dict(zip(order, backend.score(mine, model="policy", output="log_probs"), strict=True)),
            computed,
        )

    return body


@pytest.fixture(scope="module")
def separate(ranks, toolbox, model_dir):
    return ranks(step(toolbox, model_dir, "bshd", False), 1)[0]


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mesh", MESHES)
def test_shared_prompts_give_the_separate_rows_gradient(mesh, layout, ranks, toolbox, model_dir, separate):
    import torch

    parallel = MESHES[mesh]
    results = ranks(
        step(toolbox, model_dir, layout, True, **parallel), math.prod(v for v in parallel.values() if v > 1)
    )
    grads, metrics, _, computed = results[0]
    for name, expected in separate[0].items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(grads[name], expected, rtol=1e-5, atol=1e-5 * scale)
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        assert metrics[key] == pytest.approx(separate[1][key], rel=1e-5)
    scores = {index: values for result in results for index, values in result[2].items()}
    for index, values in separate[2].items():
        np.testing.assert_allclose(scores[index], values, rtol=1e-4, atol=1e-4)
    assert computed < 0.7 * separate[3], "fewer tokens pass through the layers"


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 6)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_each_response_token_sees_its_prompt_and_its_past(pairs, multiple):
    """(prompt number, response length) pairs: every query's keys spell exactly the sample up to that token."""
    import torch

    from miles.algos.config import AlgoConfig
    from miles.algos.step_batches import prepare_steps
    from miles.data.batch_layout import BatchLayout
    from miles.data.sample import Sample, Status
    from miles.data.schedule import ScheduleConfig
    from miles.data.tensors import to_tensors
    from miles.train.megatron.shared_prompts import share_prompts

    # Token ids are unique within a sample, so that a row of keys names positions.
    samples = []
    for number, (prompt, length) in enumerate(pairs):
        question = np.arange(prompt + 1) + 100 * prompt
        answer = 1000 * (number + 1) + np.arange(length)
        samples.append(
            Sample(
                f"s{number}",
                0,
                number,
                np.concatenate([question, answer]),
                len(question),
                reward=float(number),
                status=Status.COMPLETED,
            )
        )
    batch = (
        prepare_steps(samples, AlgoConfig(zero_variance="keep"), ScheduleConfig(layout=BatchLayout("thd")))
        .steps[0]
        .for_rank(0)
    )
    [micro_batch] = batch.micro_batches
    shared = share_prompts(micro_batch, to_tensors(micro_batch), torch.device("cpu"), multiple=multiple)
    if shared is None:
        assert len({prompt for prompt, _ in pairs}) == len(pairs)
        return
    tensors, layout = shared
    tokens = tensors.input_ids[0]
    assert len(tokens) % multiple == 0
    seen: list[list[int]] = []
    for bucket in layout.buckets:
        keys = bucket.queries if bucket.keys is None else bucket.keys
        for row in range(len(bucket.queries)):
            for at in range(bucket.queries.shape[1]):
                if bucket.allowed is None:
                    visible = keys[row, : at + 1]
                else:
                    visible = keys[row][bucket.allowed[min(row, len(bucket.allowed) - 1), 0, at]]
                seen.append(tokens[visible].tolist())
    for position, slot in enumerate(layout.restore.tolist()):
        assert seen[slot][-1] == tokens[position]
    for logit, sequence, index in zip(
        tensors.logit_index.tolist(), micro_batch.sequence.tolist(), micro_batch.response_index.tolist(), strict=True
    ):
        sample = samples[micro_batch.sample_index[sequence]]
        before = sample.tokens[: sample.prompt_length + index].tolist()
        assert seen[layout.restore[logit]] == before
        assert layout.positions[logit] == len(before) - 1
