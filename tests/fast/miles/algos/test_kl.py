from __future__ import annotations

from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from miles.algos import kl
from miles.algos.config import AlgoConfig, KLConfig
from miles.algos.objective import step_objective
from miles.data.tensors import BatchTensors


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
    """Logits of the policy and log-probs of the reference, near enough for low_var's bounds not to act."""
    generator = torch.Generator().manual_seed(seed)
    theta = (0.7 * torch.randn(5, generator=generator, dtype=torch.float64)).requires_grad_(True)
    return theta, torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)


def every_action(config: AlgoConfig) -> torch.Tensor:
    """Sum over all actions of pi(a)·grad of the KL term at a: what sampling estimates, through the objective itself."""
    theta, reference = toy()
    actions = len(theta)
    log_policy = theta.log_softmax(-1)
    flat = torch.arange(actions)
    batch = BatchTensors(
        input_ids=flat[None],
        position_ids=flat[None],
        bounds=None,
        logit_index=flat,
        sequence=flat,
        token_counts=torch.ones(actions, dtype=torch.int64),
        sample_ids=tuple(f"s{action}" for action in range(actions)),
        response_index=torch.zeros(actions, dtype=torch.int64),
        target_ids=flat,
        mask=torch.ones(actions, dtype=torch.bool),
        weights=log_policy.detach().exp(),
        advantages=torch.zeros(actions, dtype=torch.float64),
        ref_log_probs=reference,
    )
    everywhere = kl.support_exact(
        log_policy.repeat(actions), reference.repeat(actions), torch.arange(actions + 1) * actions
    )
    loss, _ = step_objective(log_policy, batch, config, kl_exact=everywhere)
    (grad,) = torch.autograd.grad(loss, theta)
    return grad


def exact_gradient() -> torch.Tensor:
    theta, reference = toy()
    log_policy = theta.log_softmax(-1)
    (grad,) = torch.autograd.grad((log_policy.exp() * (log_policy - reference)).sum(), theta)
    return grad


def accepted(estimator: str, unbiased: bool) -> bool:
    try:
        KLConfig(where="loss", estimator=estimator, coef=1.0, unbiased=unbiased)
    except ValidationError:
        return False
    return True


LOSS_FORMS = [
    (estimator, unbiased)
    for estimator in get_args(KLConfig.model_fields["estimator"].annotation)
    for unbiased in (False, True)
    if accepted(estimator, unbiased)
]
# Unbiased as values only, as the guide says.
BIASED = [("k3", False), ("low_var", False)]


def test_the_accepted_loss_forms_are_the_documented_ones():
    corrected = ("k3", "low_var")
    assert {name for name, unbiased in LOSS_FORMS if unbiased} == {*corrected}
    assert {name for name, unbiased in LOSS_FORMS if not unbiased} == {"k2", *corrected, "support_exact"}


@pytest.mark.parametrize(("estimator", "unbiased"), LOSS_FORMS)
def test_gradient_of_every_accepted_form_matches_the_enumerated_kl(estimator, unbiased):
    config = AlgoConfig(kl=KLConfig(where="loss", estimator=estimator, coef=1.0, unbiased=unbiased))
    off = float((every_action(config) - exact_gradient()).abs().max())
    assert off > 1e-2 if (estimator, unbiased) in BIASED else off < 1e-6


@pytest.mark.parametrize("estimator", ["k2", "support_exact"])
def test_a_form_that_is_exact_refuses_the_ratio(estimator):
    with pytest.raises(ValidationError, match=f"gradient of {estimator} is exact without it"):
        KLConfig(where="loss", estimator=estimator, coef=0.1, unbiased=True)


def test_k1_gradient_vanishes():
    theta, reference = toy()
    log_policy = theta.log_softmax(-1)
    value = kl.estimate("k1", log_policy - reference)
    (grad,) = torch.autograd.grad((log_policy.detach().exp() * value).sum(), theta)
    assert float(grad.abs().max()) < 1e-12


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


def test_low_var_is_bounded_in_value_and_gradient_however_far_the_policies_are():
    d = torch.tensor([-100.0, -25.0, 25.0, 100.0], requires_grad=True)
    out = kl.low_var(d)
    assert out.tolist() == [10.0] * 4
    (grad,) = torch.autograd.grad(out.sum(), d)
    # Without the bound on d the first would be 0 times infinity.
    assert grad.tolist() == [0.0] * 4
