"""In fp32 a request's tokens and log-probs are the same bits whatever else the engine computes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import LocalEngine

from miles_ci.declare import register_cpu_ci

register_cpu_ci(30, "stage-a-cpu", nightly=True)

VOCAB = 16

requests = st.builds(
    lambda prompt, new, seed, temperature, top_p, top_k, min_p: (
        prompt,
        {
            "max_new_tokens": new,
            "sampling_seed": seed,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "ignore_eos": True,
        },
    ),
    prompt=st.one_of(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70),
        st.integers(1, 70).map(lambda n: [i % 2 for i in range(n)]),
    ),
    new=st.integers(1, 12),
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    top_k=st.sampled_from([-1, -1, 5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
)


def results(engine, batch):
    outputs = engine.generate([p for p, _ in batch], [s for _, s in batch])
    return [(o.tokens, o.log_probs) for o in outputs]


@pytest.fixture(scope="module")
def small_engine(tiny_model):
    engine = LocalEngine(tiny_model, max_running=16, max_prefill_tokens=64)
    yield engine
    engine.close()


@settings(max_examples=12)
@given(batch=st.lists(requests, min_size=2, max_size=24), data=st.data())
def test_a_request_alone_equals_the_request_in_any_batch(small_engine, batch, data):
    engine = small_engine
    together = results(engine, batch)
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = results(engine, [batch[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(batch))] == together
    for index in data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=3)):
        assert results(engine, [batch[index]]) == [together[index]]


def _mixed_batch(count, *, longest):
    rng = random.Random(7)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))],
            {"max_new_tokens": rng.randrange(1, 40), "sampling_seed": i, "ignore_eos": True},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"share_prefixes": False},
        {"max_running": 3},
        {"max_prefill_tokens": 17},
        {"max_total_tokens": 512},
    ],
    ids=lambda o: next(iter(o)),
)
def test_results_do_not_depend_on_the_engines_own_limits(local_engine, options):
    batch = _mixed_batch(20, longest=400)
    assert results(local_engine(), batch) == results(local_engine(**options), batch)


def test_identical_prompts_share_one_prefill_and_keep_their_own_draws(local_engine):
    prompt = [*range(2, 16), 3, 5, 7, 9, 2]
    params = [{"max_new_tokens": 6, "sampling_seed": i, "ignore_eos": True} for i in range(8)]
    engine = local_engine(share_prefixes=False)
    together = engine.generate([prompt] * 8, params)
    alone = [engine.generate([prompt], [p])[0] for p in params]
    assert [o.tokens for o in together] == [o.tokens for o in alone]
    assert [o.log_probs for o in together] == [o.log_probs for o in alone]
    assert [o.cached_tokens for o in together] == [0] + [len(prompt)] * 7
    assert len({tuple(o.tokens) for o in together}) > 1


def test_a_cached_prefix_changes_nothing_but_the_count(local_engine):
    prompt = [(i * 7) % 14 + 2 for i in range(40)]  # its pages have equal content
    params = [{"max_new_tokens": 5, "sampling_seed": 1, "ignore_eos": True}]
    engine = local_engine()
    first, second = engine.generate([prompt], params)[0], engine.generate([prompt], params)[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert (first.tokens, first.log_probs) == (second.tokens, second.log_probs)
    # A later turn that repeats prompt and answer reuses both.
    longer = prompt + first.tokens + [4, 5, 6, 7]
    assert engine.generate([longer], params)[0].cached_tokens == 32
    assert engine.generate([[*longer, 2]], params)[0].cached_tokens == 48


def test_a_token_of_a_mixture_of_experts_does_not_depend_on_its_companions(tiny_moe):
    engine = LocalEngine(tiny_moe, share_prefixes=False)
    try:
        batch = _mixed_batch(24, longest=60)
        together = results(engine, batch)
        assert [results(engine, [one])[0] for one in batch[:8]] == together[:8]
    finally:
        engine.close()
