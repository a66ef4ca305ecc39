"""The outcome of a rerun: one total function over what the jobs reported.

Word lists are closed: a word we do not know is "inconsistent", never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESULTS = ("success", "failure", "cancelled", "skipped")


@dataclass(frozen=True)
class Verdict:
    """`state` passed, failed or cancelled; `reason` is empty when the rows say enough."""

    state: str
    reason: str = ""


def verdict(resolve: str, planned: Mapping[str, int], legs: Mapping[str, str], observed: Mapping[str, int]) -> Verdict:
    """Judge a rerun.

    `resolve` is the job's result; `planned` suite -> 1 for every registration that was to run; `legs` suite ->
    result of its execution; `observed` suite -> number of tests really seen in its results.
    """
    if resolve not in RESULTS or any(result not in RESULTS for result in legs.values()):
        return Verdict("failed", "inconsistent")
    if set(legs) - set(planned):
        return Verdict("failed", "inconsistent")
    if resolve == "cancelled":
        return Verdict("cancelled")
    if resolve != "success":
        return Verdict("failed", "never started")
    if not planned or all(legs.get(suite, "skipped") == "skipped" for suite in planned):
        return Verdict("failed", "nothing ran")
    results = [legs.get(suite, "skipped") for suite in planned]
    if "failure" in results or any(legs.get(s) == "success" and observed.get(s, 0) < 1 for s in planned):
        return Verdict("failed", "" if "failure" in results else "no test was observed")
    if "cancelled" in results:
        return Verdict("cancelled")
    if "skipped" in results:
        missing = ", ".join(sorted(suite for suite in planned if legs.get(suite, "skipped") == "skipped"))
        return Verdict("failed", f"did not run: {missing}")
    return Verdict("passed")
