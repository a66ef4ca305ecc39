"""From the name of an advantage estimator to what it computes, with the same checks for built-in and user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np

from miles.algos.advantages.inputs import AdvantageInputs, Estimate
from miles.algos.declared import check_name, user_function
from miles.config import ConfigError, user_code

# Returns [n] advantages, or an `Estimate` where a critic is declared.
Estimator = Callable[[AdvantageInputs], "np.ndarray | Estimate"]


def estimator(name: str) -> Estimator:
    """The function behind `algo.advantage`. `ValueError` or `ConfigError` for a name that has none."""
    check_name("advantage", name)
    if user_code.is_reference(name):
        return user_function("advantage", name)
    return importlib.import_module(f"miles.algos.advantages.{name}").estimate


def run_estimator(inputs: AdvantageInputs) -> Estimate:
    """float32 [n] advantages (and returns) of `inputs.config.advantage`; `ConfigError` for a result of another form."""
    name = inputs.config.advantage
    function = estimator(name)
    if not user_code.is_reference(name):
        found = function(inputs)
        assert isinstance(found, Estimate)
        return found
    with user_code.running(name, option="algo.advantage"):
        found = function(inputs)
    given = found if isinstance(found, Estimate) else Estimate(found)
    if inputs.config.needs_values is not (given.returns is not None):
        fix = "return Estimate(advantages, returns)" if inputs.config.needs_values else "declare critic=True"
        raise ConfigError(f"algo.advantage: {name}: returns go with a declared critic; {fix}")
    advantages = _checked(given.advantages, "advantages", inputs, name)
    return Estimate(advantages, None if given.returns is None else _checked(given.returns, "returns", inputs, name))


def _checked(values: object, what: str, inputs: AdvantageInputs, name: str) -> np.ndarray:
    n = len(inputs.mask)
    where = f"algo.advantage: {name} gave {what}"
    if not isinstance(values, np.ndarray):
        raise ConfigError(f"{where} of type {type(values).__name__}; return a numpy array [{n}], one number per token")
    if values.shape != (n,):
        fix = "spread values of rollouts with inputs.per_token" if values.shape == inputs.rewards.shape else ""
        raise ConfigError(
            f"{where} of shape {list(values.shape)} for {n} response tokens; {fix or f'return one number per token [{n}]'}"
        )
    if values.dtype not in (np.float32, np.float64):
        raise ConfigError(f"{where} of dtype {values.dtype}; return float32 or float64")
    with np.errstate(over="ignore"):
        cast = np.where(inputs.mask, values, 0.0).astype(np.float32)
    broken = np.flatnonzero(~np.isfinite(cast))
    if len(broken):
        sequence = int(np.searchsorted(np.cumsum(inputs.lengths), broken[0], side="right"))
        raise ConfigError(
            f"{where} that are not finite in float32: {values[broken[0]]} at a trained token of sequence {sequence} "
            f"({len(broken)} in all); a group of one or of equal rewards has no spread to divide by"
        )
    return cast
