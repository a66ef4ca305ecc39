"""The NVFP4 configuration from the environment: Transformer Engine's variables, read strictly.

| variable | values | rule |
|---|---|---|
| `OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG` | "1" | the gate: any other value, or none, is off |
| `NVTE_USE_FAST_MATH` | 0, "" | 1 is refused: it changes the association of operations |
| `NVTE_NVFP4_4OVER6` | none (default), weights, activations, all | on for weights and all |
| `NVTE_NVFP4_4OVER6_E4M3_USE_256` | same, default all | 256 only with 4over6 on |
| `NVTE_NVFP4_4OVER6_ERR_MODE` | MAE (default), MSE | |
| `NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH` | 0, 1, "" | ignored when 4over6 is off |

Imports neither torch nor Triton; the gate is decided before either is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

GATE = "OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG"
FAST_MATH = "NVTE_USE_FAST_MATH"
FOUR_OVER_SIX = "NVTE_NVFP4_4OVER6"
USE_256 = "NVTE_NVFP4_4OVER6_E4M3_USE_256"
ERR_MODE = "NVTE_NVFP4_4OVER6_ERR_MODE"
ERR_FAST = "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"
VARIABLES = (FAST_MATH, FOUR_OVER_SIX, USE_256, ERR_MODE, ERR_FAST)
SCOPES = ("none", "weights", "activations", "all")


def process_environment() -> Mapping[str, str]:
    """The one place of this package that reads the process's environment; tests and recipes pass a mapping."""
    return os.environ


def fake_qat_gate(environ: Mapping[str, str] | None = None) -> bool:
    """True only where the gate variable is exactly "1"."""
    environ = process_environment() if environ is None else environ
    return environ.get(GATE) == "1"


def _choice(environ: Mapping[str, str], variable: str, allowed: tuple[str, ...], default: str, *, fold: bool) -> str:
    value = environ.get(variable, default)
    found = value.lower() if fold else value
    if found not in allowed:
        raise ValueError(f"{variable}={value!r}: allowed are {', '.join(a or repr(a) for a in allowed)}")
    return found


def current_nvfp4_qdq_config(environ: Mapping[str, str] | None = None) -> NVFP4QDQConfig:
    """The weight rounding that the environment asks for; ValueError names variable, value and what is allowed."""
    environ = process_environment() if environ is None else environ
    if environ.get(FAST_MATH, "") not in ("", "0"):
        raise ValueError(
            f"{FAST_MATH}={environ[FAST_MATH]!r}: allowed are 0 and unset, since fast math changes the rounding of weights"
        )
    scope = _choice(environ, FOUR_OVER_SIX, SCOPES, "none", fold=True)
    use_256 = _choice(environ, USE_256, SCOPES, "all", fold=True)
    mode = _choice(environ, ERR_MODE, ("MAE", "MSE"), "MAE", fold=False)
    fast = _choice(environ, ERR_FAST, ("", "0", "1"), "", fold=False)
    if scope not in ("weights", "all"):
        return NVFP4QDQConfig()
    return NVFP4QDQConfig(
        use_4over6=True,
        e4m3_max=256 if use_256 in ("weights", "all") else 448,
        error_mode=ErrorMode(mode),
        error_use_fast_math=fast == "1",
    )


__all__ = ["ErrorMode", "NVFP4QDQConfig", "current_nvfp4_qdq_config", "fake_qat_gate", "process_environment"]
