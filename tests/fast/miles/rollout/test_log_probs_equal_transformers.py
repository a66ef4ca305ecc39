"""The engine's log-probs are those of a full forward pass of transformers on the same checkpoint, in fp32."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from inprocess import LocalEngine


@pytest.fixture(scope="module", params=["tiny_model", "tiny_moe"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder):
    engine = LocalEngine(folder)
    yield engine
    engine.close()


def full_forward(reference, prompt, tokens, temperature):
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_full_forward_pass(engine, reference, temperature):
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 16) for _ in range(length)] for length in (1, 4, 15, 16, 17, 100, 300)]
    params = [
        {"max_new_tokens": 40, "temperature": temperature, "sampling_seed": i, "ignore_eos": True}
        for i in range(len(prompts))
    ]
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        expected = full_forward(reference, prompt, output.tokens, temperature)
        assert np.abs(np.array(output.log_probs) - expected).max() <= 1e-5


def test_greedy_equals_transformers_generate(engine, reference):
    prompt = [5, 9, 2, 12]
    output = engine.generate([prompt], [{"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}])[0]
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 4),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
        )
    assert output.tokens == expected[0, 4:].tolist()
    assert np.abs(np.array(output.log_probs) - full_forward(reference, prompt, output.tokens, 1.0)).max() <= 1e-5
