"""The only reader of environment variables. Every name under our prefix is declared here, and others' that are read.

An undeclared `MILES_*` variable is refused at start, so that a misspelt one cannot be ignored silently.
`MILES_CI_*` belongs to the `ci` package and is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from miles.config.errors import ConfigError
from miles.config.names import suggestion

PREFIX = "MILES_"
CI_PREFIX = "MILES_CI_"

VARIABLES: dict[str, str] = {
    "MILES_RUNS_DIR": "folder that holds run folders when the recipe names none (default: runs)",
    "MILES_NO_COLOR": "1: plain terminal output without colour or live tables",
    "MILES_RUN_MARK": "set by a run for the processes it starts, so that they are found when it is gone",
    "MLFLOW_TRACKING_URI": "MLflow store of a run whose `observe.mlflow.uri` names none",
    "WANDB_MODE": "`online` or `offline`, for a run whose `observe.wandb.mode` says neither",
    "RAY_ADDRESS": "Ray cluster to run on, as `cluster.address` of a recipe",
}


def read(name: str, default: str | None = None, *, environ: Mapping[str, str] | None = None) -> str | None:
    """Value of a declared variable. Raises `KeyError` for a name not declared above (a bug of ours)."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in miles.config.environment")
    return (os.environ if environ is None else environ).get(name, default)


def refuse_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Raise `ConfigError` naming every variable under our prefix that nothing reads."""
    names = sorted(os.environ if environ is None else environ)
    unknown = [n for n in names if n.startswith(PREFIX) and not n.startswith(CI_PREFIX) and n not in VARIABLES]
    if unknown:
        lines = [f"environment variable {name} is not known; {suggestion(name, VARIABLES)}" for name in unknown]
        raise ConfigError("\n".join(lines))
