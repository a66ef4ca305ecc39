"""Estimators as a user would write them, right and wrong; loaded by their path."""

from __future__ import annotations

from miles.algos.advantages import AdvantageInputs, Estimate, declares


@declares(groups=True)
def per_group(inputs: AdvantageInputs):
    return inputs.per_token(inputs.rewards)


@declares(critic=True, token_rewards=True, reads=("gamma",))
def with_critic(inputs: AdvantageInputs) -> Estimate:
    assert inputs.values is not None
    return Estimate(inputs.token_rewards() - inputs.values, inputs.token_rewards())


@declares(reference=True)
def against_reference(inputs: AdvantageInputs):
    assert inputs.old_log_probs is not None
    assert inputs.ref_log_probs is not None
    return inputs.per_token(inputs.rewards) - (inputs.old_log_probs - inputs.ref_log_probs)


@declares(reads=("gama",))
def misdeclared(inputs: AdvantageInputs):
    return inputs.per_token(inputs.rewards)


def plain(inputs: AdvantageInputs):
    return inputs.per_token(inputs.rewards)


def two_arguments(inputs: AdvantageInputs, more: int):
    return inputs.per_token(inputs.rewards) * more
