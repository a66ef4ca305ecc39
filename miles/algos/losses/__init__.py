"""Policy losses, one a file, per token on flat [n] fp32 tensors; the critic's loss; and their reduction.

A file holds the formula as a pure function under its own name, and `loss`, which takes it from `LossInputs`. What each
needs of a run is declared in `miles.algos.declared`.
"""

from miles.algos.losses.inputs import LossInputs, PolicyLoss
from miles.algos.losses.ratio import LOG_RATIO_CLAMP, log_ratio, masked
from miles.algos.losses.reduction import reduce_loss
from miles.algos.losses.registry import loss_function, policy_loss
from miles.algos.losses.value import value_loss

__all__ = [
    "LOG_RATIO_CLAMP",
    "LossInputs",
    "PolicyLoss",
    "log_ratio",
    "loss_function",
    "masked",
    "policy_loss",
    "reduce_loss",
    "value_loss",
]
