"""Every environment variable that the harness reads, in one place.

A name that begins with `MILES_CI_` and is not listed here is refused: a misspelt switch must not be
silently ignored. Values are read through `read`, so that `VARIABLES` stays the whole list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from miles_ci.errors import UsageError, suggestion

PREFIX = "MILES_CI_"

VARIABLES: dict[str, str] = {
    "MILES_CI_CACHE_DIR": "Folder of the scan cache, outside the repository (default: ~/.cache/miles-ci; in GitHub Actions none).",
    "MILES_CI_HISTORY_URL": "History store: sqlite:///path or postgresql://…; a secret on CI.",
    "MILES_CI_LOCK_DIR": "Folder with one lock file per GPU, shared by all runner processes of a host.",
    "MILES_CI_METRICS_DIR": "Set for each test: where it writes the metric records that bounds read.",
    "MILES_CI_PORT_BASE": "Set for each test: first of the 200 ports that belong to its lease.",
    "MILES_CI_PLAN": "Path of the uploaded plan that a shard verifies and runs.",
    "MILES_CI_PLAN_DIGEST": "Digest of the plan a shard must run; another plan is refused.",
    "MILES_CI_LEASE": "Set for each test: JSON of the device lease (devices, ports, backend).",
    "MILES_CI_SUITE": "Set for each test: the suite it runs in.",
    "MILES_CI_SHARD": "Set for each test: shard of the suite, i/n.",
    "MILES_CI_UNIT": "Set for each test: the planned unit that this process runs.",
    "MILES_CI_OBSERVED": "Set for each test: file into which the plugin writes what it collected and ran.",
    "MILES_CI_RESULTS_DIR": "Folder of results.json, JUnit XML and observed.json (default: results).",
    "MILES_CI_RUNNER_NAME": "Name of this runner in results (default: the host name).",
}


def read(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The value of a declared variable; empty counts as unset. An undeclared name is a programming error."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in miles_ci.environment.VARIABLES")
    return (os.environ if environ is None else environ).get(name) or None


def refuse_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Raise `UsageError` naming every `MILES_CI_` variable that is set and not declared."""
    present = sorted(name for name in (os.environ if environ is None else environ) if name.startswith(PREFIX))
    problems = [f"{name} is not known{suggestion(name, VARIABLES)}" for name in present if name not in VARIABLES]
    if problems:
        raise UsageError("environment: " + "; ".join(problems))
