"""required-check fails closed; a pool switched off turns both ROCm shards off, with the reason everywhere it matters."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles_ci.bot.github import Client
from miles_ci.bot.required_check import judge, needs_of
from miles_ci.bot.runs import read_run
from miles_ci.bot.status_card import collect, make_card
from miles_ci.cli import main
from miles_ci.registry import load_fleet
from miles_ci.report.cards import lark, pr_comment, summary
from miles_ci.workflows.generate import render
from miles_ci.workflows.model import Workflow
from miles_ci.workflows.simulate import JOB_RESULTS, Event, Outcome, local_resolver, simulate
from tests.fast.ci.bot.conftest import ROOT, Job
from tests.fast.ci.bot.helpers.github_server import GitHub

REASON = "node is being re-imaged after Xid 79"
ROCM = ["stage-c-4-gpu-mi300x", "stage-c-4-gpu-mi355x"]


def test_the_bound_passes_exactly_as_specified() -> None:
    stages = ["a", "b"]
    for plan, ra, rb in itertools.product(JOB_RESULTS, repeat=3):
        for ca, cb, left_out, cancelled in itertools.product((0, 2), (0, 2), ((), ("x",)), (False, True)):
            got = judge(
                needs={"plan": plan, "a": ra, "b": rb},
                counts=dict(zip(stages, (ca, cb), strict=True)),
                never_executed=left_out,
                cancelled=cancelled,
            )
            stages_ok = all(
                (count > 0 and result == "success") or (count == 0 and result == "skipped")
                for count, result in ((ca, ra), (cb, rb))
            )
            assert got.ok is (plan == "success" and stages_ok and not left_out and not cancelled), (
                plan,
                ra,
                rb,
                ca,
                cb,
                left_out,
                cancelled,
            )


@pytest.mark.parametrize(
    "needs",
    [
        {},
        {"plan": "success", "a": "great"},
        {"plan": "success"},
        {"plan": "success", "a": "success", "authorise": "failure"},
    ],
)
def test_what_the_bound_does_not_know_fails(needs: dict[str, str]) -> None:
    assert not judge(needs=needs, counts={"a": 1}).ok


def test_a_plan_that_is_missing_although_its_job_succeeded_fails() -> None:
    assert not judge(needs={"plan": "success"}, counts=None).ok


def test_malformed_needs_count_as_missing() -> None:
    assert needs_of([]) == {}
    assert needs_of({"a": 1, "b": {}, "c": {"result": "success"}}) == {"a": "missing", "b": "missing", "c": "success"}


def disable(checkout: Path, pool: str = "mi300x-4gpu") -> None:
    registry = yaml.safe_load((checkout / "registry.yaml").read_text())
    registry["pools"][pool]["disabled"] = {"reason": REASON, "issue": "#123", "until": "2026-12-20"}
    (checkout / "registry.yaml").write_text(yaml.safe_dump(registry, sort_keys=False))
    (checkout / "tests/rocm").mkdir(exist_ok=True)
    for model in ("mi300x", "mi355x"):
        for n in range(2):
            call = f"register_rocm_ci(est_time=60, suite='stage-c-4-gpu-{model}', hardware=['{model}'], labels=['megatron'])"
            text = f"from miles_ci.declare import register_rocm_ci\n\n{call}\n\n\ndef test_x():\n    assert True\n"
            (checkout / f"tests/rocm/test_amd_{model}_{n}.py").write_text(text)


def plan(job: Job, labels: list[str]) -> dict[str, str]:
    event = {"pull_request": {"labels": [{"name": name} for name in labels]}}
    code, outputs = job(
        "plan", "--cadence", "regular", "--root", ".", "--suites", " ".join(ROCM), "--output", "plan.json", event=event
    )
    assert code == 0
    return outputs


def check(job: Job, needs: dict[str, Any]) -> tuple[int, dict[str, str]]:
    values = {"NEEDS": json.dumps(needs), "CANCELLED": ""}
    return job(
        "required-check",
        "--suites",
        " ".join(ROCM),
        "--plan",
        ".",
        "--results",
        "results",
        "--output",
        "merged",
        **values,
    )


def test_a_disabled_pool_skips_its_shards_and_shows_the_reason_in_plan_bound_summary_and_cards(
    job: Job, checkout: Path, hub: GitHub, client: Client
) -> None:
    before = render(load_fleet(ROOT / "registry.yaml"))
    disable(checkout)
    assert render(load_fleet(checkout / "registry.yaml")) == before  # no workflow file changes
    outputs = plan(job, ["run-ci-megatron"])
    assert (outputs["count-stage-c-4-gpu-mi300x"], outputs["count-stage-c-4-gpu-mi355x"]) == ("0", "2")
    assert REASON in outputs["summary"]
    workflows = {Path(path).name: Workflow.from_text(text, path) for path, text in before.items()}
    values = {name: value for name, value in outputs.items() if name != "summary"}
    outcomes: dict[str, Outcome | str] = {"plan": Outcome("success", values), "stage-c-4-gpu-mi355x": "success"}
    states = simulate(
        workflows["pr-test-rocm.yml"], Event("workflow_dispatch"), outcomes, resolve=local_resolver(workflows)
    )
    assert states["stage-c-4-gpu-mi300x"].result == "skipped"
    assert states["stage-c-4-gpu-mi355x"].ran

    # The other model's shards ran and reported; the check is green and says why MI300X did not.
    made = json.loads(Path("plan.json").read_text())
    for shard in made["shards"]:
        tests = [
            {"unit": unit["id"], "path": unit["path"], "outcome": "passed", "num_gpus": 4, "est_s": 1.0, "message": "", "tolerated": "", "attempts": [], "metrics": [], "nodes": {f"{unit['path']}::test_x": "passed"}, "node_ms": {}}
            for unit in shard["units"]
        ]  # fmt: skip
        info = {
            "suite": shard["suite"],
            "backend": "rocm",
            "hardware": "mi355x",
            "shard": f"{shard['index']}/{shard['count']}",
            "plan_digest": made["digest"],
            "cadence": "regular",
            "run_id": "1",
            "run_attempt": 1,
            "commit": "c",
            "event": "e",
            "ref": "r",
            "runner": "r",
            "host": "h",
            "started_at": 0.0,
            "ended_at": 1.0,
        }
        folder = checkout / "results" / f"{shard['suite']}-{shard['index']}"
        folder.mkdir(parents=True)
        record = {
            "schema": 2,
            "status": "finished",
            "exit_code": 0,
            "run": info,
            "devices": [],
            "counts": {},
            "notes": [],
            "tests": tests,
        }
        (folder / "results.json").write_text(json.dumps(record))
    needs = {
        name: {"result": state.result, "outputs": {}} for name, state in states.items() if name != "required-check"
    }
    code, outputs = check(job, needs)
    assert code == 0, outputs["summary"]
    assert f"stage-c-4-gpu-mi300x: skipped (pool mi300x-4gpu is disabled: {REASON}" in outputs["summary"]

    run = hub.run("pr-test-rocm.yml", title="x", status="completed", conclusion="success")
    hub.artifact(run["id"], "merged-rocm", {"merged.json": (checkout / "merged/merged.json").read_bytes()})
    assert REASON in collect(client, run["id"]).report.skipped["stage-c-4-gpu-mi300x"]
    card = make_card(client, read_run(client, run["id"]), now=0.0)
    for rendered in (pr_comment.render(card), summary.render(card), lark.request(card, 1, "demo").decode()):
        assert "re-imaged after Xid 79" in rendered.replace("\\-", "-")


def test_without_the_switch_both_shards_are_planned(job: Job, checkout: Path) -> None:
    disable(checkout, "b200-4gpu")
    outputs = plan(job, ["run-ci-megatron"])
    legs = json.loads(outputs["matrix-stage-c-4-gpu-mi300x"])["include"]
    assert [(leg["shard"], leg["shards"], leg["runs_on"]) for leg in legs] == [
        (n, 2, ["self-hosted", "amd", "mi300x", "4gpu"]) for n in (1, 2)
    ]


def test_a_never_executed_shard_fails_the_check(job: Job, checkout: Path) -> None:
    disable(checkout, "b200-4gpu")
    plan(job, ["run-ci-megatron"])
    needs = {
        "authorise": {"result": "success"},
        "plan": {"result": "success"},
        **{suite: {"result": "success"} for suite in ROCM},
    }
    code, outputs = check(job, needs)
    assert code == 1
    assert "never executed: " in outputs["summary"]


def test_simulation_prints_which_jobs_would_run_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "simulate-workflow",
        "--root",
        str(ROOT),
        "--event",
        "pull_request",
        "--results",
        "stage-a-cpu=failure",
        "--count",
        "stage-b-1-gpu-h200=3",
    ]
    assert main(arguments) == 0
    out = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert "failure" in out["stage-a-cpu"]
    assert "skipped" in out["stage-b-1-gpu-h200"]
    assert "failure" in out["required-check"]
    assert main([*arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["stage-b-1-gpu-h200"]["result"] == "skipped"
    assert (
        main(
            [
                "simulate-workflow",
                "--root",
                str(ROOT),
                "--workflow",
                "nightly.yml",
                "--event",
                "schedule",
                "--results",
                "cuda/stage-a-cpu=failure",
            ]
        )
        == 0
    )
    nightly = capsys.readouterr().out
    assert "    stage-b-1-gpu-h200  success" in nightly


@pytest.mark.parametrize(
    "extra",
    [
        ["--results", "stage-a-cpu=great"],
        ["--results", "nothing=failure"],
        ["--workflow", "none.yml"],
        ["--results", "x"],
    ],
)
def test_act_refuses_what_it_does_not_know(extra: list[str]) -> None:
    assert main(["simulate-workflow", "--root", str(ROOT), "--event", "pull_request", *extra]) == 2
