"""From the name of a policy loss to what it computes, with the same form for built-in and user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from miles.algos.declared import check_name, user_function
from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ratio import masked
from miles.algos.sequences import Sequences
from miles.config import ConfigError, user_code

if TYPE_CHECKING:
    from miles.algos.config import AlgoConfig

# Returns fp32 [n] with gradient, or a `PolicyLoss` that also says which tokens were clipped.
Loss = Callable[[LossInputs], "torch.Tensor | PolicyLoss"]


def loss_function(name: str) -> Loss:
    """The function behind `algo.loss`. `ValueError` or `ConfigError` for a name that has none."""
    check_name("loss", name)
    if user_code.is_reference(name):
        return user_function("loss", name)
    return importlib.import_module(f"miles.algos.losses.{name}").loss


def policy_loss(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    config: AlgoConfig,
    *,
    ref_log_probs: torch.Tensor | None = None,
) -> PolicyLoss:
    """The loss that `config.loss` names; `ConfigError` for a user's result of another form.

    Advantages at masked tokens do not matter.
    """
    inputs = LossInputs(
        log_probs=log_probs,
        old=old,
        advantages=masked(advantages, mask),
        mask=mask,
        sequences=sequences,
        config=config,
        ref_log_probs=ref_log_probs,
    )
    name = config.loss
    function = loss_function(name)
    if not user_code.is_reference(name):
        found = function(inputs)
        assert isinstance(found, PolicyLoss)
        return found
    with user_code.running(name, option="algo.loss"):
        found = function(inputs)
    if isinstance(found, torch.Tensor):
        never = torch.zeros_like(inputs.mask)
        found = PolicyLoss(found, inputs.log_ratio().detach().exp(), never, never)
    if not isinstance(found, PolicyLoss):
        raise ConfigError(
            f"algo.loss: {name} gave a {type(found).__name__}; return a tensor [n], one loss per token, or a PolicyLoss"
        )
    return _checked(found, inputs, name)


def _checked(found: PolicyLoss, inputs: LossInputs, name: str) -> PolicyLoss:
    n = tuple(inputs.log_probs.shape)
    forms = (
        ("loss", found.loss, torch.float32),
        ("ratio", found.ratio, torch.float32),
        ("clipped_low", found.clipped_low, torch.bool),
        ("clipped_high", found.clipped_high, torch.bool),
    )
    for what, tensor, dtype in forms:
        if tuple(tensor.shape) != n:
            raise ConfigError(
                f"algo.loss: {name} gave {what} of shape {list(tensor.shape)} for {n[0]} tokens; return one value per "
                "token [n], not yet averaged: algo.reduction does that"
            )
        if tensor.dtype != dtype or tensor.device != inputs.log_probs.device:
            raise ConfigError(
                f"algo.loss: {name} gave {what} of {tensor.dtype} on {tensor.device}; return {dtype} on "
                f"{inputs.log_probs.device}"
            )
    if inputs.log_probs.requires_grad and not found.loss.requires_grad:
        raise ConfigError(
            f"algo.loss: {name} gave a loss without gradient; compute it from inputs.log_probs, and detach only weights"
        )
    # At masked tokens it counts for nothing whatever it is.
    loss = inputs.active(found.loss)
    broken = ~torch.isfinite(loss.detach())
    # Under skip_step the gradient's norm says the same, and the step is left out.
    if inputs.config.nonfinite == "raise" and bool(broken.any()):
        at = int(broken.nonzero()[0])
        raise ConfigError(
            f"algo.loss: {name} gave {float(found.loss[at].detach()):g} at token {at} of the micro-batch "
            f"(log-prob {float(inputs.log_probs[at].detach()):g}, old {float(inputs.old[at]):g}, advantage "
            f"{float(inputs.advantages[at]):g}); return finite losses, e.g. from inputs.log_ratio(), which is bounded"
        )
    return PolicyLoss(loss, found.ratio.detach(), found.clipped_low, found.clipped_high)
