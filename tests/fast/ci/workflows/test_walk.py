"""The proof over all states, and that it catches what people really break."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_ci.registry import Fleet
from miles_ci.workflows.emit import fold
from miles_ci.workflows.lint import job_rules, lint
from miles_ci.workflows.model import Workflow, WorkflowError
from miles_ci.workflows.rules import NEEDS_TABLE, rules_for
from miles_ci.workflows.walk import Violation, walk, walk_job

LIMIT_S = 30
ROOT = Path(__file__).resolve().parents[4]


def test_every_job_of_every_file_obeys_its_rule_in_every_state(workflows: Mapping[str, Workflow], fleet: Fleet) -> None:
    start = time.process_time()
    report = walk(workflows, fleet)
    assert not report.violations, report.text()
    assert set(report.tried) == set(workflows)
    assert sum(report.tried.values()) > 100_000
    assert time.process_time() - start < LIMIT_S


def test_every_gpu_stage_has_a_rule_over_the_whole_gating_table(fleet: Fleet) -> None:
    rules = rules_for(fleet)
    for suite, spec in fleet.suites.items():
        if spec.backend == "cuda":
            assert rules["pr-test.yml"][suite].cadences
            assert "stage-a-cpu" in rules["pr-test.yml"][suite].jobs
            assert "stage-b-cpu" not in rules["pr-test.yml"][suite].jobs
    assert len(NEEDS_TABLE) == 10
    assert all(runs for (bypass, _), runs in NEEDS_TABLE.items() if bypass)


def mutate(raw: Mapping[str, Any], job: str, condition: str | None, needs: list[str] | None = None) -> dict[str, Any]:
    changed = copy.deepcopy(dict(raw))
    if condition is None:
        changed["jobs"][job].pop("if", None)
    else:
        changed["jobs"][job]["if"] = condition
    if needs is not None:
        changed["jobs"][job]["needs"] = needs
    return changed


def mutants(workflow: Workflow) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(job, what was done, file): every way in which a hand edit has broken such a condition before."""
    for job in workflow.jobs.values():
        text = job.condition
        if text is None:
            continue
        yield job.id, "the if is dropped", mutate(workflow.raw, job.id, None)
        for at, part in enumerate(parts := fold(text)):
            rest = [p.removesuffix(" &&").removesuffix(" ||") for i, p in enumerate(parts) if i != at]
            if rest:
                yield job.id, f"conjunct {part!r} is dropped", mutate(workflow.raw, job.id, " && ".join(rest))
        for old, new in {
            "== 'success'": "== 'failure'", "!= '0'": "== '0'", "== '0'": "!= '0'", "!cancelled()": "'!cancelled()'",
            "always()": "success()", " || ": " && ", "== 'true'": "!= 'true'", "'skipped'": "'cancelled'",
        }.items():  # fmt: skip
            for at in range(text.count(old)):
                pieces = text.split(old)
                changed = old.join(pieces[: at + 1]) + new + old.join(pieces[at + 1 :])
                yield job.id, f"occurrence {at + 1} of {old!r} becomes {new!r}", mutate(workflow.raw, job.id, changed)
        if text.startswith("!cancelled()") and ("||" in text or "needs." not in text):  # elsewhere it changes nothing
            yield job.id, "success() is added", mutate(workflow.raw, job.id, f"success() && {text}")
        for need in job.needs:
            if f"needs.{need}." in text:
                left = [name for name in job.needs if name != need]
                yield job.id, f"need {need} is dropped", mutate(workflow.raw, job.id, text, left)


def test_every_seeded_mutant_is_caught(workflows: Mapping[str, Workflow], fleet: Fleet) -> None:
    rules, total, alive = rules_for(fleet), 0, []
    seen: set[tuple[str, str]] = set()
    for name, workflow in workflows.items():
        for job, what, raw in mutants(workflow):
            # Stages of the same shape have the same mutants: prove one of each kind.
            shape = (what.replace(job, "JOB"), str(raw["jobs"][job].get("uses", job)))
            if shape in seen and fleet.suites.get(job) is not None:
                continue
            seen.add(shape)
            total += 1
            changed = Workflow.from_dict(raw, name)
            _, violation = walk_job(changed, name, changed.jobs[job], rules[name][job], fleet, first=True)
            # Equal to the implicit success() in every state, but it hides that: our own rule refuses it.
            refused = any(code == "status-function" for _, code, _ in job_rules(changed, changed.jobs[job]))
            if violation is None and not refused:
                alive.append((name, job, what))
    assert not alive, alive
    assert total >= 100


def test_a_condition_that_names_a_status_function_only_in_a_comment_is_caught(
    workflows: Mapping[str, Workflow], fleet: Fleet
) -> None:
    workflow = workflows["pr-test.yml"]
    job = workflow.jobs["stage-c-8-gpu-h200"]
    text = str(job.condition).replace("!cancelled() && ", "")
    changed = Workflow.from_dict(
        mutate(workflow.raw, job.id, f"{text} && 'always() # !cancelled()' != ''"), "pr-test.yml"
    )
    rule = rules_for(fleet)["pr-test.yml"][job.id]
    _, violation = walk_job(changed, "pr-test.yml", changed.jobs[job.id], rule, fleet, first=True)
    assert violation is not None
    assert any(finding.code == "status-function" for finding in lint({**workflows, "pr-test.yml": changed}))


def test_an_image_job_that_reimposes_fast_fail_is_caught_by_the_whole_run(
    workflows: Mapping[str, Workflow], fleet: Fleet
) -> None:
    workflow = workflows["pr-test.yml"]
    text = str(workflow.jobs["resolve-image"].condition) + " && needs.stage-a-cpu.result == 'success'"
    changed = Workflow.from_dict(mutate(workflow.raw, "resolve-image", text), "pr-test.yml")
    report = walk({**workflows, "pr-test.yml": changed}, fleet)
    broken = {violation.job for violation in report.violations}
    assert "resolve-image" in broken
    assert "stage-b-1-gpu-h200" in broken
    assert any(job.startswith("cuda/stage-c") for job in broken)


def test_the_counterexample_says_what_to_look_at(workflows: Mapping[str, Workflow], fleet: Fleet) -> None:
    workflow = workflows["pr-test.yml"]
    job = workflow.jobs["stage-c-8-gpu-h200"]
    text = str(job.condition).replace("needs.plan.outputs.bypass == 'true' || ", "")
    changed = Workflow.from_dict(mutate(workflow.raw, job.id, text), "pr-test.yml")
    _, violation = walk_job(
        changed, "pr-test.yml", changed.jobs[job.id], rules_for(fleet)["pr-test.yml"][job.id], fleet
    )
    assert isinstance(violation, Violation)
    lines = violation.text().splitlines()
    assert lines[0] == "pr-test.yml: job stage-c-8-gpu-h200 must RUN but is SKIPPED when"
    assert violation.weight == 2  # one bad result and one bypass, nothing else
    assert any("needs.stage-a-cpu.result" in line for line in lines)
    assert lines[-2] == "  rule: table of needed suites"
    assert violation.text() in (ROOT / "docs/ci/workflows.md").read_text()  # the guide shows this very case


def test_a_new_job_without_a_rule_and_a_missing_job_are_findings(
    workflows: Mapping[str, Workflow], fleet: Fleet
) -> None:
    raw = copy.deepcopy(dict(workflows["status-sweeper.yml"].raw))
    raw["jobs"] = {"other": raw["jobs"]["sweep"]}
    report = walk({"status-sweeper.yml": Workflow.from_dict(raw, "status-sweeper.yml")}, fleet)
    assert {violation.job for violation in report.violations} == {"other", "starvation", "sweep"}


def test_a_cadence_that_the_caller_does_not_state_is_a_finding(workflows: Mapping[str, Workflow], fleet: Fleet) -> None:
    raw = copy.deepcopy(dict(workflows["nightly.yml"].raw))
    raw["jobs"]["cuda"]["with"]["cadence"] = "${{ github.event_name }}"
    report = walk({**workflows, "nightly.yml": Workflow.from_dict(raw, "nightly.yml")}, fleet)
    assert [violation.file for violation in report.violations] == ["nightly.yml"]


def test_a_condition_github_would_refuse_is_an_error_and_not_a_pass(workflows: Mapping[str, Workflow]) -> None:
    raw = mutate(workflows["pr-test.yml"].raw, "required-check", "always() && secrets.X")
    with pytest.raises(WorkflowError, match="unknown context"):
        Workflow.from_dict(raw)


def test_the_required_check_is_never_skipped_because_a_skipped_one_would_pass(
    workflows: Mapping[str, Workflow],
) -> None:
    for name in ("pr-test.yml", "pr-test-rocm.yml"):
        check = workflows[name].jobs["required-check"]
        assert check.condition == "always()"
        assert set(check.needs) == set(workflows[name].jobs) - {"required-check"}
