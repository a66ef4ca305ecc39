"""Sampling: the right distribution, the right support, reproducible draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.engines.embedded.sampling import SamplingRows, draw, uniform


def rows(n, *, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, want_support=False, seed=None):
    return SamplingRows(
        temperature=np.full(n, temperature, dtype=np.float32),
        top_p=np.full(n, top_p),
        top_k=np.full(n, top_k),
        min_p=np.full(n, min_p),
        seed=np.arange(n, dtype=np.uint64) if seed is None else np.full(n, seed, dtype=np.uint64),
        position=np.zeros(n, dtype=np.int64) if seed is None else np.arange(n),
        want_support=np.full(n, want_support),
    )


def expected_kept(p, top_p, top_k, min_p):
    """By definition, one token at a time: rank, mass before, share of the best."""
    kept, before = set(), 0.0
    for rank, token in enumerate(sorted(range(len(p)), key=lambda t: (-p[t], t))):
        if rank == 0 or (
            (top_p >= 1.0 or before < top_p) and (top_k <= 0 or rank < top_k) and p[token] >= min_p * max(p)
        ):
            kept.add(token)
        before += p[token]
    return kept


@pytest.mark.parametrize("by", ["seed", "position"])
def test_frequencies_follow_the_softmax_at_the_temperature(by):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    n = 20000
    drawn = draw(logits.repeat(n, 1), rows(n, temperature=0.8, seed=None if by == "seed" else 5))
    p = torch.softmax(logits.double() / 0.8, 0).numpy()
    counts = np.bincount(drawn.tokens, minlength=5)
    chi2 = ((counts - n * p) ** 2 / np.maximum(n * p, 1e-9))[:4].sum()
    assert chi2 < 16.3, counts  # 99.9 % quantile for 3 degrees of freedom
    assert counts[4] == 0


@settings(max_examples=60)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1]),
    top_k=st.sampled_from([-1, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
)
def test_support_is_what_the_definition_keeps_and_draws_stay_in_it(logits, top_p, top_k, min_p):
    table = torch.tensor(logits).repeat(50, 1)
    drawn = draw(table, rows(50, top_p=top_p, top_k=top_k, min_p=min_p, want_support=True))
    log_p = torch.log_softmax(table[0], 0)
    p = log_p.double().exp().numpy()
    edge = np.abs(np.cumsum(np.sort(p)[::-1]) - top_p).min() < 1e-9 or np.abs(p / p.max() - min_p).min() < 1e-7
    # Log-probs of another summation order may rank two that are nearly equal the other way round.
    edge |= np.diff(np.unique(p)).min(initial=1.0) < 1e-6
    ids, values = drawn.support[0]
    if not edge:
        assert set(ids.tolist()) == expected_kept(p.tolist(), top_p, top_k, min_p)
    assert ids.tolist() == sorted(ids.tolist())
    assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
    mass = np.log(p[ids].sum())
    assert np.allclose(values, log_p.numpy()[ids] - mass, atol=1e-5)
    assert set(drawn.tokens.tolist()) <= set(ids.tolist())
    # The reported log-prob stays that of the full vocabulary.
    assert np.allclose(drawn.log_probs, log_p.numpy()[drawn.tokens], rtol=0, atol=2e-6)


def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one():
    logits = torch.tensor([[0.5, 3.0, 3.0, 1.0]])
    drawn = draw(logits, rows(1, temperature=0.0, top_p=0.5, want_support=True))
    assert drawn.tokens.tolist() == [1]
    assert drawn.log_probs[0] == torch.log_softmax(logits[0], 0)[1]
    assert drawn.support[0][0].tolist() == [1]
    assert drawn.support[0][1].tolist() == [0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_logit_anywhere_in_the_row_surfaces(bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    drawn = draw(logits, rows(3))
    assert np.isfinite(drawn.log_probs).tolist() == [True, False, True]


def test_a_row_does_not_depend_on_companions_with_filters():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    mixed = rows(6)
    mixed.top_p[[1, 4]] = 0.5
    mixed.temperature[2] = 0.0
    together = draw(logits, mixed)
    for i in range(6):
        one = SamplingRows(*(getattr(mixed, name)[i : i + 1] for name in SamplingRows.__slots__))
        alone = draw(logits[i : i + 1], one)
        assert (alone.tokens[0], alone.log_probs[0]) == (together.tokens[i], together.log_probs[i])


def test_large_tables_are_drawn_in_blocks_with_equal_results(monkeypatch):
    torch.manual_seed(1)
    logits = torch.randn(9, 40)
    whole = draw(logits, rows(9, top_k=3, want_support=True))
    monkeypatch.setattr("miles.rollout.engines.embedded.sampling._ROW_BUDGET", 80)
    blocks = draw(logits, rows(9, top_k=3, want_support=True))
    assert np.array_equal(whole.tokens, blocks.tokens)
    assert np.array_equal(whole.log_probs, blocks.log_probs)
    assert all(np.array_equal(whole.support[i][0], blocks.support[i][0]) for i in range(9))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**64 - 1))
def test_uniform_numbers_are_spread_and_differ_by_position(seed):
    u = uniform(np.full(4000, seed, dtype=np.uint64), np.arange(4000))
    assert ((u >= 0) & (u < 1)).all()
    assert len(np.unique(u)) == 4000
    counts = np.histogram(u, bins=10, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 40


def test_a_support_does_not_depend_on_companions_and_a_single_id_has_log_prob_zero():
    torch.manual_seed(2)
    logits = torch.randn(12, 60) * 3
    mixed = rows(12, want_support=True)
    mixed.top_p[::2], mixed.top_p[4], mixed.top_k[[1, 3]], mixed.temperature[5] = 0.8, 1e-6, [1, 7], 0.0
    mixed.want_support[6] = False
    together = draw(logits, mixed).support
    assert sorted(together) == [i for i in range(12) if i != 6]
    for i, (ids, values) in together.items():
        one = SamplingRows(*(getattr(mixed, name)[i : i + 1] for name in SamplingRows.__slots__))
        alone = draw(logits[i : i + 1], one).support[0]
        assert np.array_equal(alone[0], ids)
        assert np.array_equal(alone[1], values)
    assert [together[i][1].tolist() for i in (1, 4, 5)] == [[0.0]] * 3
    assert len(together[3][0]) == 7
    assert len(together[7][0]) == 60
