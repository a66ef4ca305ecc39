from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algos.config import AlgoConfig, OPSMConfig
from miles.algos.corrections import opsm_mask
from miles.algos.losses import policy_loss, reduce_loss, value_loss
from miles.algos.losses.cispo import cispo
from miles.algos.losses.dual_clip import dual_clip
from miles.algos.losses.gspo import gspo
from miles.algos.losses.ppo_clip import ppo_clip
from miles.algos.sequences import Sequences

ALL = torch.ones(3, dtype=torch.bool)


def sequences(*lengths: int) -> Sequences:
    counts = torch.tensor(lengths)
    return Sequences(torch.repeat_interleave(torch.arange(len(lengths)), counts), counts)


def ratios(*values: float) -> torch.Tensor:
    """Log-probs whose ratio to old log-probs of 0 is as given."""
    return torch.tensor([math.log(v) for v in values], requires_grad=True)


def test_ppo_clip_by_hand():
    logp = ratios(1.5, 1.5, 0.5, 0.5, 1.0)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    out = ppo_clip(logp, torch.zeros(5), advantages, torch.ones(5, dtype=torch.bool), low=0.8, high=1.3)
    torch.testing.assert_close(out.loss, torch.tensor([-1.3, 1.5, -0.5, 0.8, -2.0]))
    (grad,) = torch.autograd.grad(out.loss.sum(), logp)
    # Clipped sides have no gradient; others have -r·A.
    torch.testing.assert_close(grad, torch.tensor([0.0, 1.5, -0.5, 0.0, -2.0]))
    assert out.clipped_high.tolist() == [True, False, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    logp = ratios(10.0, 2.0, 10.0)
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    out = dual_clip(logp, torch.zeros(3), advantages, ALL, low=0.8, high=1.2, c=3.0)
    torch.testing.assert_close(out.loss, torch.tensor([3.0, 2.0, -1.2]))
    (grad,) = torch.autograd.grad(out.loss.sum(), logp)
    torch.testing.assert_close(grad, torch.tensor([0.0, 2.0, 0.0]))
    with pytest.raises(ValueError, match="above 1"):
        dual_clip(logp, torch.zeros(3), advantages, ALL, low=0.8, high=1.2, c=1.0)


def test_gspo_uses_the_geometric_mean_of_active_tokens():
    logp = torch.tensor([0.2, 5.0, 0.1, -0.4], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0])
    out = gspo(logp, torch.zeros(4), advantages, mask, sequences(3, 1), low=0.5, high=2.0)
    s = math.exp(0.15)
    torch.testing.assert_close(out.ratio, torch.tensor([s, s, s, math.exp(-0.4)]))
    (grad,) = torch.autograd.grad((out.loss * mask).sum(), logp)
    # Two active tokens of value -s·A, each moving with half of every active log-prob.
    torch.testing.assert_close(grad, torch.tensor([-s, 0.0, -s, 2 * math.exp(-0.4)]))


def test_cispo_gradient_by_hand():
    logp = ratios(3.0, 1.1, 0.2)
    advantages = torch.tensor([1.0, -2.0, 4.0])
    out = cispo(logp, torch.zeros(3), advantages, ALL, low=0.5, high=2.0)
    torch.testing.assert_close(out.loss.detach(), -torch.tensor([2.0, 1.1, 0.5]) * advantages * logp.detach())
    (grad,) = torch.autograd.grad(out.loss.sum(), logp)
    torch.testing.assert_close(grad, torch.tensor([-2.0, 2.2, -2.0]))


def test_value_loss_by_hand():
    values = torch.tensor([2.0, 0.1, 5.0], requires_grad=True)
    out = value_loss(values, torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3.0, 1.0, 0.0]), ALL, eps=0.2)
    # 0.5·max((2-3)^2, (1.2-3)^2), 0.5·max((0.1-1)^2, same), 0.5·max(25, 0.04)
    torch.testing.assert_close(out.detach(), 0.5 * torch.tensor([3.24, 0.81, 25.0]))


def clipped_value_loss(value: float, old: float, target: float, eps: float) -> tuple[float, float]:
    """(loss, gradient) by cases, as PPO's text has it: the worse of the plain and the clipped prediction's error."""
    nearest = old - eps if value < old - eps else old + eps if value > old + eps else value
    plain, clipped = (value - target) ** 2, (nearest - target) ** 2
    if clipped > plain:
        return 0.5 * clipped, 0.0  # the bound is active, and it does not move with the value
    return 0.5 * plain, value - target


@settings(max_examples=300)
@given(*[st.floats(-3, 3, width=32)] * 3, st.sampled_from([0.05, 0.2, 1.0]))
def test_value_loss_and_gradient_equal_the_cases_of_the_definition(value, old, target, eps):
    expected, slope = clipped_value_loss(value, old, target, eps)
    v = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.bool)
    out = value_loss(v, torch.tensor([old]).double(), torch.tensor([target]).double(), one, eps=eps)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert float(out.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    errors = abs((value - target) ** 2 - 2 * expected)
    if errors == 0.0 and value != old and abs(abs(value - old) - eps) > 1e-9:
        assert float(grad) == pytest.approx(slope, abs=1e-9)
    elif errors > 1e-9:
        assert float(grad) == slope == 0.0


def test_value_loss_reaches_every_case_and_masked_values_move_nothing():
    cases = [(0.1, 0.0, 1.0), (2.0, 0.0, 0.0), (2.0, 0.0, 3.0), (-2.0, 0.0, -3.0), (-2.0, 0.0, 1.0)]
    v = torch.tensor([c[0] for c in cases] + [math.nan], requires_grad=True)
    old, target = (torch.tensor([c[i] for c in cases] + [math.nan]) for i in (1, 2))
    mask = torch.tensor([True] * len(cases) + [False])
    out = value_loss(v, old, target, mask, eps=0.5)
    (grad,) = torch.autograd.grad(out.sum(), v)
    expected = [clipped_value_loss(*case, 0.5) for case in cases] + [(0.0, 0.0)]
    torch.testing.assert_close(out, torch.tensor([e[0] for e in expected]))
    torch.testing.assert_close(grad, torch.tensor([e[1] for e in expected]))
    assert {e[1] == 0.0 for e in expected[:-1]} == {True, False}


def test_value_loss_equals_trl_s_rule_on_random_values():
    rng = torch.Generator().manual_seed(0)
    v, old, g = torch.randn(3, 200, generator=rng)
    clipped = torch.clamp(v, old - 0.2, old + 0.2)
    expected = 0.5 * torch.max((v - g) ** 2, (clipped - g) ** 2)
    mask = torch.ones(200, dtype=torch.bool)
    torch.testing.assert_close(value_loss(v, old, g, mask, eps=0.2), expected)


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "gspo", "cispo", "sft"])
def test_masked_tokens_cannot_make_values_or_gradients_non_finite(loss):
    config = AlgoConfig(loss=loss, dual_clip_c=3.0 if loss == "dual_clip" else None)
    logp = torch.tensor([-1.0, -math.inf, -2.0, 1e4], requires_grad=True)
    old = torch.tensor([-1.1, math.nan, -2.0, -1e4])
    mask = torch.tensor([True, False, True, False])
    advantages = torch.tensor([1.0, math.nan, -1.0, math.inf])
    out = policy_loss(logp, old, advantages, mask, sequences(2, 2), config)
    loss_value = reduce_loss(out.loss, mask.float())
    assert torch.isfinite(loss_value)
    (grad,) = torch.autograd.grad(loss_value, logp)
    assert torch.isfinite(grad).all()
    assert grad[1] == grad[3] == 0.0


def test_a_sequence_s_ratio_is_bounded_too():
    for sign in (1.0, -1.0):
        logp = torch.full((3,), sign * 500.0, requires_grad=True)
        out = gspo(logp, torch.zeros(3), torch.ones(3), ALL, sequences(3), low=0.8, high=1.2)
        torch.testing.assert_close(out.ratio, torch.full((3,), math.exp(sign * 20.0)))
        assert torch.isfinite(torch.autograd.grad(out.loss.sum(), logp)[0]).all()


def test_the_clips_that_metrics_count_are_those_that_act():
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    options = {"old": torch.zeros(7), "advantages": advantages, "mask": torch.ones(7, dtype=torch.bool)}
    dual = dual_clip(ratios(4.0, 4.0, 2.0, 0.5, 0.5, 4.0, 0.5), low=0.8, high=1.2, c=3.0, **options)
    # The ceiling c acts on A < 0 alone, the upper bound on A > 0, the lower one on A < 0.
    assert dual.clipped_high.tolist() == [True, True, False, False, False, False, False]
    assert dual.clipped_low.tolist() == [False, False, False, False, True, False, False]
    weighted = cispo(ratios(4.0, 4.0, 1.0, 0.5, 0.5, 1.1, 0.9), low=0.8, high=1.2, **options)
    assert weighted.clipped_high.tolist() == [True, True, False, False, False, False, False]
    assert weighted.clipped_low.tolist() == [False, False, False, True, True, False, False]


def test_huge_ratios_are_clamped_not_infinite():
    logp = torch.tensor([500.0, -500.0, 0.0], requires_grad=True)
    out = ppo_clip(logp, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), ALL, low=0.8, high=1.2)
    assert torch.isfinite(out.loss).all()
    assert float(out.ratio.max()) == pytest.approx(math.exp(20), rel=1e-5)


def test_sequence_sums_equal_a_loop_and_their_gradient_is_one():
    values = torch.randn(9, requires_grad=True)
    groups = sequences(4, 0, 5, 0)
    total = groups.total(values, "test")
    torch.testing.assert_close(
        total, torch.stack([values[:4].sum(), values[:0].sum(), values[4:].sum(), values[:0].sum()])
    )
    (grad,) = torch.autograd.grad((total * torch.tensor([2.0, 3.0, 5.0, 7.0])).sum(), values)
    assert grad.tolist() == [2.0] * 4 + [5.0] * 5
    assert sequences(0, 0).total(torch.zeros(0), "empty").tolist() == [0.0, 0.0]


def test_opsm_drops_negative_advantages_of_sequences_that_moved_away():
    old = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    new = torch.tensor([-3.0, -1.0, -3.0, -1.0, -0.1, -0.1])  # mean old - new: 2, 2, 0.1
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    mask = torch.ones(6, dtype=torch.bool)
    kept = opsm_mask(new, old, advantages, mask, sequences(2, 2, 2), delta=OPSMConfig(delta=0.5).delta)
    assert kept.tolist() == [False, False, True, True, True, True]


def test_an_unknown_loss_lists_the_known():
    broken = AlgoConfig().model_copy(update={"loss": "ppo"})
    with pytest.raises(
        ValueError,
        match=r"unknown loss 'ppo'; .*\(built in: ppo_clip, dual_clip, gspo, cispo, sft; your own code: path",
    ):
        policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), ALL, sequences(3), broken)


def test_weights_of_zero_remove_a_token_whatever_its_value():
    values = torch.tensor([1.0, math.nan, 2.0])
    assert float(reduce_loss(values, torch.tensor([0.5, 0.0, 0.25]))) == 1.0
    assert np.isnan(float(reduce_loss(values, torch.tensor([0.5, 1.0, 0.25]))))
