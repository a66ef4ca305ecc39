"""No code reaches a machine of ours before the guard: the proof, what it must find, and forks through whole runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_ci.bot.required_check import judge
from miles_ci.registry import Fleet
from miles_ci.registry.hosted import is_hosted, self_hosted_suites
from miles_ci.workflows.generate import render
from miles_ci.workflows.guards import prove_guards
from miles_ci.workflows.lint import lint
from miles_ci.workflows.model import Workflow
from miles_ci.workflows.simulate import Event, Outcome, local_resolver, simulate
from miles_ci.workflows.walk import walk

LEGS = [
    *(("pr-test.yml", suite, "authorise") for suite in ("stage-b-1-gpu-h200", "stage-c-8-gpu-h200")),
    ("pr-test-rocm.yml", "stage-c-4-gpu-mi300x", "authorise"),
    *(("rerun-test.yml", f"run-{backend}", "resolve") for backend in ("cpu", "cuda", "rocm")),
]
Change = Callable[[dict[str, Any]], None]


def changed(workflows: Mapping[str, Workflow], file: str, change: Change) -> dict[str, Workflow]:
    raw = copy.deepcopy(dict(workflows[file].raw))
    change(raw["jobs"])
    return {**workflows, file: Workflow.from_dict(raw, file)}


def found(workflows: Mapping[str, Workflow], fleet: Fleet) -> dict[tuple[str, str], str]:
    return {(item.file, item.job.split("/")[0]): item.why for item in prove_guards(workflows, fleet)[1]}


def test_every_leg_on_a_machine_of_ours_waits_for_the_guard(workflows: Mapping[str, Workflow], fleet: Fleet) -> None:
    legs, violations = prove_guards(workflows, fleet)
    assert violations == ()
    assert legs == len(self_hosted_suites(fleet)) + 3  # every GPU suite, and the three legs of a rerun


def without_guard(job: dict[str, Any], guard: str) -> None:
    parts = [part for part in str(job["if"]).split(" && ") if f"needs.{guard}.result" not in part]
    job["if"] = " && ".join(parts)


@pytest.mark.parametrize(("file", "leg", "guard"), LEGS)
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("dropped", "runs although no guard succeeded"), ("not failed", "runs although no guard succeeded"), ("or always", "runs although no guard succeeded"),
        ("wrong way", "runs although no guard succeeded"), ("or skipped", "runs although no guard succeeded"), ("no need", "needs no guard"), ("by who asks", "which is not for a leg to decide by"), ("another commit", "and not the commit that"),
    ],
)  # fmt: skip
def test_a_leg_that_gets_round_the_guard_is_found(
    workflows: Mapping[str, Workflow], fleet: Fleet, file: str, leg: str, guard: str, what: str, why: str
) -> None:
    def change(jobs: dict[str, Any]) -> None:
        job, passed = jobs[leg], f"needs.{guard}.result == 'success'"
        if what == "dropped":
            without_guard(job, guard)
        elif what == "not failed":  # a skipped guard let nothing through
            job["if"] = str(job["if"]).replace(passed, f"needs.{guard}.result != 'failure'")
        elif what == "wrong way":
            job["if"] = str(job["if"]).replace(passed, f"needs.{guard}.result != 'success'")
        elif what == "or always":
            job["if"] = f"({job['if']}) || always()"
        elif what == "or skipped":
            job["if"] = str(job["if"]).replace(passed, f"({passed} || needs.{guard}.result == 'skipped')")
        elif what == "no need":
            without_guard(job, guard)
            everything = {name for name, body in jobs.items() if guard in (name, *body.get("needs", []))}
            job["needs"] = [name for name in job["needs"] if name not in everything]
            job["if"] = "!cancelled()"
        elif what == "by who asks":
            job["if"] = f"({job['if']}) || github.event.pull_request.user.login == 'maria'"
        else:
            job["with"]["ref"] = "${{ github.event.pull_request.head.sha }}"

    got = found(changed(workflows, file, change), fleet)
    assert why in got.pop((file, leg))
    # nothing else is blamed, except what needs the file
    assert {name for name, _ in got} <= {"nightly.yml", "weekly.yml", "release.yml"}


def set_checkout(ref: str) -> Change:
    return lambda jobs: jobs["authorise"]["steps"][0]["with"].update(ref=ref)


@pytest.mark.parametrize(
    "change",
    [
        set_checkout("${{ github.event.pull_request.head.sha }}"), set_checkout("main"),
        lambda jobs: jobs["authorise"]["steps"][0]["with"].pop("ref"),
        lambda jobs: jobs["authorise"]["steps"][-1].update({"if": "github.actor != 'x'"}),
        lambda jobs: jobs["authorise"]["steps"][-1].update({"continue-on-error": True}),
        lambda jobs: jobs["authorise"]["steps"][-1].update({"run": "echo python -m miles_ci bot authorise"}),
        lambda jobs: jobs["authorise"]["steps"][-1].update({"run": "python -m miles_ci bot resolve-deps --image x"}),
        lambda jobs: jobs["authorise"]["permissions"].update(checks="write"),
        lambda jobs: jobs["authorise"].pop("permissions") and jobs["authorise"].update(permissions={"contents": "write"}),
    ],
)  # fmt: skip
def test_a_job_that_only_looks_like_the_guard_is_none(
    workflows: Mapping[str, Workflow], fleet: Fleet, change: Change
) -> None:
    got = found(changed(workflows, "pr-test.yml", change), fleet)
    assert {job for file, job in got if file == "pr-test.yml"} == {
        s for s in self_hosted_suites(fleet) if "mi3" not in s
    }


@pytest.mark.parametrize(
    "machine",
    [
        ["self-hosted", "linux"], "gpu-pool", "ubuntu-24.04-16core", {"group": "gpu"}, {"group": "gpu", "labels": "ubuntu-24.04"}, ["ubuntu-24.04", "self-hosted"],
        "${{ fromJSON(needs.plan.outputs.labels) }}", "${{ vars.RUNNER }}", "${{ inputs.where || 'ubuntu-24.04' }}",
    ],
)  # fmt: skip
def test_a_new_job_on_any_other_machine_is_a_leg(workflows: Mapping[str, Workflow], fleet: Fleet, machine: Any) -> None:
    job = {"runs-on": machine, "needs": ["plan"], "steps": [{"run": "make"}]}
    got = found(changed(workflows, "pr-test.yml", lambda jobs: jobs.update(extra=job)), fleet)
    # Whoever calls the file opens it too.
    assert set(got) == {
        ("pr-test.yml", "extra"),
        *((f"{name}.yml", "cuda") for name in ("nightly", "weekly", "release")),
    }


def test_a_hosted_stage_whose_machine_is_not_a_literal_is_a_leg(
    workflows: Mapping[str, Workflow], fleet: Fleet
) -> None:
    for machines in ("${{ toJSON(matrix.runs_on) }}", '["self-hosted"]', "not json"):

        def change(jobs: dict[str, Any], machines: str = machines) -> None:
            jobs["stage-a-cpu"]["with"]["runs_on"] = machines

        assert ("pr-test.yml", "stage-a-cpu") in found(changed(workflows, "pr-test.yml", change), fleet)


@pytest.mark.parametrize(
    ("labels", "hosted"),
    [
        (["ubuntu-24.04"], True), (["ubuntu-latest"], True), (["ubuntu-24.04-arm"], True), (["macos-15-xlarge"], True), (["windows-2025"], True),
        (["self-hosted"], False), (["ubuntu-24.04", "gpu"], False), (["self-hosted", "ubuntu-24.04"], False), (["ubuntu-gpu"], False), (["ubuntu-24.04-gpu"], False),
        ([], False), (["Ubuntu-24.04x"], False), (["h200"], False), (["ubuntu-24.04\n"], False),
    ],
)  # fmt: skip
def test_only_githubs_own_image_names_are_hosted(labels: list[str], hosted: bool) -> None:
    assert is_hosted(labels) is hosted


@pytest.fixture(scope="module")
def own_cpu(fleet: Fleet) -> tuple[Fleet, Mapping[str, Workflow]]:
    """The same fleet with its first CPU suite on machines of ours."""
    data = fleet.model_dump()
    data["suites"]["stage-a-cpu"]["runs_on"] = ["self-hosted", "cpu-pool"]
    moved = Fleet.model_validate(data)
    return moved, {Path(path).name: Workflow.from_text(text, path) for path, text in render(moved).items()}


def test_a_cpu_pool_of_ours_is_gated_like_a_gpu_pool(own_cpu: tuple[Fleet, Mapping[str, Workflow]]) -> None:
    fleet, files = own_cpu
    stage = files["pr-test.yml"].jobs["stage-a-cpu"]
    assert stage.raw["with"]["runs_on"] == '["self-hosted", "cpu-pool"]'
    assert stage.raw["with"]["ref"] == "${{ needs.authorise.outputs.sha }}"
    legs, violations = prove_guards(files, fleet)
    assert (legs, violations) == (len(self_hosted_suites(fleet)) + 3, ())
    assert lint(files) == []
    report = walk(files, fleet)
    assert not report.violations, report.text()

    def change(jobs: dict[str, Any]) -> None:
        without_guard(jobs["stage-a-cpu"], "authorise")

    open_files = changed(files, "pr-test.yml", change)
    assert ("pr-test.yml", "stage-a-cpu") in found(open_files, fleet)
    assert {item.job for item in walk(open_files, fleet).violations} >= {"stage-a-cpu"}


def run(files: Mapping[str, Workflow], fleet: Fleet, authorise: str, count: int) -> dict[str, str]:
    """A pull request's run with so many tests selected in every CUDA suite: job -> result."""
    suites = [job for job in files["pr-test.yml"].jobs if job in fleet.suites]
    counts = {suite: 2 if fleet.suites[suite].backend == "cpu" else count for suite in suites}
    own = sum(counts[suite] for suite in suites if suite in self_hosted_suites(fleet))
    legs = {f"matrix-{suite}": '{"include":[{"shard":1,"shards":1,"runs_on":["x"]}]}' for suite in suites}
    outputs = {f"count-{suite}": str(number) for suite, number in counts.items()} | legs
    outputs |= {"bypass": "true", "count-gpu": str(count), "count-self-hosted": str(own)}
    results: dict[str, Outcome | str] = {"plan": Outcome("success", outputs), "authorise": authorise}
    results["resolve-deps"] = Outcome("success", {"image_build": "false"})
    states = simulate(files["pr-test.yml"], Event("pull_request"), results, resolve=local_resolver(files))
    needs = {name: state.result for name, state in states.items() if name != "required-check"}
    return needs | {"verdict": "passed" if judge(needs=needs, counts=counts).ok else "failed"}


@pytest.mark.parametrize("authorise", ["failure", "cancelled", "skipped"])
def test_a_forks_push_with_a_leftover_run_label_reaches_no_machine_of_ours(
    workflows: Mapping[str, Workflow], fleet: Fleet, authorise: str
) -> None:
    got = run(workflows, fleet, authorise, count=3)
    for suite in self_hosted_suites(fleet):
        assert got.get(suite, "skipped") == "skipped"
    assert (got["stage-a-cpu"], got["resolve-image"], got["docker-build"]) == ("success", "skipped", "skipped")
    assert got["verdict"] == "failed"  # what was asked for and did not run is no pass
    assert run(workflows, fleet, "success", count=3)["stage-c-8-gpu-h200"] == "success"
    assert run(workflows, fleet, "success", count=3)["verdict"] == "passed"


def test_a_pull_request_that_needs_no_machine_of_ours_is_not_asked_for_an_approval(
    workflows: Mapping[str, Workflow], fleet: Fleet, own_cpu: tuple[Fleet, Mapping[str, Workflow]]
) -> None:
    got = run(workflows, fleet, "failure", count=0)
    assert (got["authorise"], got["stage-a-cpu"], got["verdict"]) == ("skipped", "success", "passed")
    got = run(own_cpu[1], own_cpu[0], "failure", count=0)
    assert (got["authorise"], got["stage-a-cpu"], got["verdict"]) == ("failure", "skipped", "failed")
