"""On the CPU the trainer's log-probs of what the embedded engine sampled are the engine's own, bit for bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

HELPERS = Path(__file__).parents[2] / "rollout" / "helpers"
PROMPTS = [5, 3, 5, 1, 9, 2]


def sampled(folder, *, seed, group=4, new_tokens=7):
    """Samples of prompts of different lengths, `group` for each, from a real engine."""
    from miles.data.sample import Sample, Status

    sys.path.insert(0, str(HELPERS))
    from inprocess import LocalEngine

    source = random.Random(seed)
    prompts = [[source.randrange(2, 15) for _ in range(length)] for length in PROMPTS]
    prompts = [prompt for prompt in prompts for _ in range(group)]
    params = [
        {"max_new_tokens": new_tokens, "temperature": 1.0, "sampling_seed": seed + i} for i in range(len(prompts))
    ]
    engine = LocalEngine(folder)
    try:
        outputs = engine.generate(prompts, params)
    finally:
        engine.close()
    return [
        Sample(
            f"s{i}", i // group, i, np.array([*prompt, *output.tokens]), len(prompt), reward=source.random(),
            status=Status.COMPLETED, rollout_log_probs=np.array(output.log_probs, dtype=np.float32),
        )
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("family", ["model_dir", "moe_dir"])
def test_log_probs_equal_the_engines_bit_for_bit(family, share, layout, request, ranks, toolbox):
    folder = request.getfixturevalue(family)

    def body(rank, world, port):
        samples = sampled(folder, seed=11)
        backend = toolbox.backend(folder, rank, world, port, share_prompts=share)
        batch = toolbox.batch(samples, layout=layout, tokens=96).for_rank(0)
        assert len(batch.micro_batches) > 1, "the number of rows varies"
        order = [int(index) for item in batch.micro_batches for index in item.sample_index if index >= 0]
        return [
            (samples[index].rollout_log_probs, got)
            for index, got in zip(order, backend.score(batch, model="policy", output="log_probs"), strict=True)
        ]

    pairs = ranks(body, 1)[0]
    assert len(pairs) == 4 * len(PROMPTS)
    for ours, trained in pairs:
        np.testing.assert_array_equal(ours, trained)
        assert len(ours)


def test_an_experts_result_does_not_depend_on_how_many_tokens_it_gets(ranks, toolbox, moe_dir):
    def body(rank, world, port):
        import torch

        backend = toolbox.backend(moe_dir, rank, world, port)
        model = backend.policy.chunks[0].model
        expert = next(m for m in model.modules() if hasattr(m, "local_experts")).local_experts[0]
        generator = torch.Generator().manual_seed(0)
        tokens, scale = torch.randn(9, 32, generator=generator), torch.rand(9, generator=generator)
        with torch.no_grad():
            whole, _ = expert(tokens, scale)
            return [torch.equal(expert(tokens[:count], scale[:count])[0], whole[:count]) for count in range(9)]

    assert ranks(body, 1)[0] == [True] * 9
