"""`required-check`, the only required check: it fails closed.

Passes iff the plan succeeded, every stage with tests succeeded, every stage without was skipped, the merged
results show no test that was never executed, and the run was not cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_ci.errors import CiError
from miles_ci.plan.model import Plan
from miles_ci.report.merge import Merged, merge
from miles_ci.run.results import RESULTS_NAME, read_results
from miles_ci.workflows.simulate import JOB_RESULTS


@dataclass(frozen=True)
class CheckVerdict:
    """`problems` is empty iff the check passes; `notes` says what was skipped and why."""

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def judge(
    *,
    needs: Mapping[str, str],
    counts: Mapping[str, int] | None,
    never_executed: Sequence[str] = (),
    cancelled: bool = False,
    disabled: Mapping[str, str] | None = None,
) -> CheckVerdict:
    """The check as a pure function.

    `needs` job -> result; `counts` stage -> planned tests, None when there is no plan; `never_executed` what the merge
    found; `disabled` stage -> reason for stages whose pools are switched off.
    """
    problems: list[str] = []
    notes: list[str] = []
    if cancelled:
        problems.append("the run was cancelled")
    # A guard that was not asked let nothing through: its stages are skipped, which counts if they had tests.
    if needs.get("authorise", "success") not in ("success", "skipped"):
        problems.append(f"authorise: {needs['authorise']}; its log says who may approve this commit, and how")
    if needs.get("plan", "success") != "success":
        problems.append(f"plan: {needs['plan']}")
    if "plan" not in needs:
        problems.append("plan: not among the needed jobs")
    unknown = sorted(f"{name}: {result}" for name, result in needs.items() if result not in JOB_RESULTS)
    problems += [f"{text} is no result" for text in unknown]
    for stage, count in (counts or {}).items():
        result = needs.get(stage, "missing")
        if count > 0 and result != "success":
            problems.append(f"{stage}: {result}, with {count} planned")
        elif count == 0 and result != "skipped":
            problems.append(f"{stage}: {result}, with nothing planned")
        elif count == 0:
            notes.append(f"{stage}: skipped ({(disabled or {}).get(stage, 'nothing selected')})")
    if counts is None and needs.get("plan") == "success":
        problems.append("the plan is missing although its job succeeded")
    problems += [f"never executed: {name}" for name in never_executed]
    return CheckVerdict(tuple(problems), tuple(notes))


def needs_of(data: Any) -> dict[str, str]:
    """`toJSON(needs)` -> job -> result; anything malformed becomes a result that fails."""
    if not isinstance(data, Mapping):
        return {}
    return {
        str(job): str(value.get("result", "missing")) if isinstance(value, Mapping) else "missing"
        for job, value in data.items()
    }


def find_plan(folder: Path) -> Plan | None:
    """The uploaded plan below a folder; None when there is none or it is not intact."""
    files = sorted(folder.rglob("plan.json")) if folder.is_dir() else []
    try:
        return Plan.load(files[0]) if len(files) == 1 else None
    except CiError:
        return None


def merged_results(
    plan: Plan, folder: Path, needs: Mapping[str, str], suites: Sequence[str], disabled: Mapping[str, str]
) -> Merged:
    """Merge what the shards uploaded; a stage that did not start is listed with the reason."""
    files = sorted(folder.rglob(RESULTS_NAME)) if folder.is_dir() else []
    skipped = {
        suite: disabled.get(suite)
        or (plan.suite(suite).reason if not plan.shards_of(suite) else None)
        or "its job was skipped"
        for suite in suites
        if needs.get(suite) == "skipped"
    }
    return merge(plan, [read_results(file) for file in files], skipped=skipped, suites=list(suites))


def text(verdict: CheckVerdict) -> str:
    head = "required-check: passed" if verdict.ok else "required-check: failed"
    return "\n".join(
        [head, *(f"  {problem}" for problem in verdict.problems), *(f"  note: {note}" for note in verdict.notes)]
    )
