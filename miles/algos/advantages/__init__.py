"""Advantage estimators, one a file: from rewards (and values, KL) to one number per response token.

Numpy on flat arrays, so that the process that collects samples needs no torch; statistics in float64, two passes.
A file holds the formula as a pure function under its own name, and `estimate`, which takes it from `AdvantageInputs`.
What each needs of a run is declared in `miles.algos.declared`.
"""

from miles.algos.advantages.inputs import AdvantageInputs, Estimate
from miles.algos.advantages.registry import estimator, run_estimator
from miles.algos.declared import declares

__all__ = ["AdvantageInputs", "Estimate", "declares", "estimator", "run_estimator"]
