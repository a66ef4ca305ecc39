"""The outcome of a rerun: one total function over what the jobs reported.

Word lists are closed: a word we do not know is "inconsistent", never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miles_ci.workflows.simulate import JOB_RESULTS


@dataclass(frozen=True)
class RerunVerdict:
    """`state` passed, failed or cancelled; `reason` is empty when the rows say enough."""

    state: str
    reason: str = ""


def verdict(
    resolve: str, planned: Mapping[str, int], legs: Mapping[str, str], observed: Mapping[str, int]
) -> RerunVerdict:
    """Judge a rerun.

    `resolve` is the job's result; `planned` suite -> 1 for every registration that was to run; `legs` suite ->
    result of its execution; `observed` suite -> number of tests really seen in its results.
    """
    if resolve not in JOB_RESULTS or any(result not in JOB_RESULTS for result in legs.values()):
        return RerunVerdict("failed", "inconsistent")
    if set(legs) - set(planned):
        return RerunVerdict("failed", "inconsistent")
    if resolve == "cancelled":
        return RerunVerdict("cancelled")
    if resolve != "success":
        return RerunVerdict("failed", "never started")
    if not planned or all(legs.get(suite, "skipped") == "skipped" for suite in planned):
        return RerunVerdict("failed", "nothing ran")
    results = [legs.get(suite, "skipped") for suite in planned]
    if "failure" in results or any(legs.get(s) == "success" and observed.get(s, 0) < 1 for s in planned):
        return RerunVerdict("failed", "" if "failure" in results else "no test was observed")
    if "cancelled" in results:
        return RerunVerdict("cancelled")
    if "skipped" in results:
        missing = ", ".join(sorted(suite for suite in planned if legs.get(suite, "skipped") == "skipped"))
        return RerunVerdict("failed", f"did not run: {missing}")
    return RerunVerdict("passed")
