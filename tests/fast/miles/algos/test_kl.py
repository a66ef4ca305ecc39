from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from miles.algos import kl
from miles.algos.config import AlgoConfig, KLConfig


def test_values_by_hand():
    d = torch.tensor([0.5, -1.0, 0.0])
    torch.testing.assert_close(kl.k1(d), d)
    torch.testing.assert_close(kl.k2(d), torch.tensor([0.125, 0.5, 0.0]))
    torch.testing.assert_close(kl.k3(d), torch.exp(-d) - 1 + d)
    assert kl.low_var(torch.tensor([-1000.0, 1000.0])).tolist() == [10.0, 10.0]
    assert (kl.low_var(torch.randn(1000)) >= 0).all()


def test_k1_loss_refused():
    with pytest.raises(ValidationError, match="k1 in the loss has zero expected gradient; use k2"):
        KLConfig(where="loss", estimator="k1", coef=0.1)
    AlgoConfig(advantage="gae", kl=KLConfig(where="reward", estimator="k1", coef=0.1))


def test_unknown_estimator_lists_the_known():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; choose one of k1, k2, k3, low_var"):
        kl.estimate("k4", torch.zeros(1))


def toy(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_(True)
    return theta, torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)


def expected_gradient(estimator: str, *, unbiased: bool = False) -> torch.Tensor:
    """Sum over all actions of pi(a)·grad of the estimator at a: what sampling estimates."""
    theta, reference = toy()
    log_policy = theta.log_softmax(-1)
    value = kl.estimate(estimator, log_policy - reference)
    if unbiased:
        value = value * (log_policy - log_policy.detach()).exp()
    (grad,) = torch.autograd.grad((log_policy.detach().exp() * value).sum(), theta)
    return grad


def exact_gradient() -> torch.Tensor:
    theta, reference = toy()
    log_policy = theta.log_softmax(-1)
    (grad,) = torch.autograd.grad((log_policy.exp() * (log_policy - reference)).sum(), theta)
    return grad


def test_k2_gradient_matches_enumerated_kl():
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient())


def test_k1_gradient_vanishes_and_k3_gradient_is_biased():
    assert float(expected_gradient("k1").abs().max()) < 1e-12
    assert float((expected_gradient("k3") - exact_gradient()).abs().max()) > 1e-2


def test_the_unbiased_form_makes_k3_exact_on_policy():
    torch.testing.assert_close(expected_gradient("k3", unbiased=True), exact_gradient())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_values_are_the_kl(estimator):
    theta, reference = toy()
    log_policy = theta.detach().log_softmax(-1)
    exact = (log_policy.exp() * (log_policy - reference)).sum()
    value = (log_policy.exp() * kl.estimate(estimator, log_policy - reference)).sum()
    torch.testing.assert_close(value, exact)


def test_support_exact_is_the_kl_on_each_support():
    log_policy = torch.cat([torch.randn(3).log_softmax(-1), torch.zeros(1), torch.randn(2).log_softmax(-1)])
    log_reference = torch.cat([torch.randn(3).log_softmax(-1), torch.zeros(1), torch.randn(2).log_softmax(-1)])
    out = kl.support_exact(log_policy, log_reference, torch.tensor([0, 3, 4, 6]))
    for row, part in enumerate((slice(0, 3), slice(3, 4), slice(4, 6))):
        expected = torch.nn.functional.kl_div(log_reference[part], log_policy[part], log_target=True, reduction="sum")
        torch.testing.assert_close(out[row], expected)
    with pytest.raises(ValueError, match="must be on the same support"):
        kl.support_exact(log_policy, log_reference[:5], torch.tensor([0, 3, 4, 6]))
