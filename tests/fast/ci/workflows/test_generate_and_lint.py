"""Generated files are current and deterministic; our own rules refuse what has hurt before."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles_ci.cli import main
from miles_ci.errors import UsageError
from miles_ci.registry import Fleet, load_fleet
from miles_ci.workflows import node_tools, tools
from miles_ci.workflows.emit import to_yaml
from miles_ci.workflows.generate import HEADER, drift, render
from miles_ci.workflows.lint import lint
from miles_ci.workflows.model import Workflow, all_strings, parse_yaml
from miles_ci.workflows.parts import action
from miles_ci.workflows.walk import walk


def test_the_committed_files_are_what_the_registry_gives(fleet: Fleet, root: Path) -> None:
    assert drift(fleet, root) == ""


def test_an_edited_missing_or_foreign_file_is_drift_with_exit_7(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(root / "registry.yaml", tmp_path)
    assert main(["generate", "--root", str(tmp_path)]) == 0
    assert main(["generate", "--check", "--root", str(tmp_path)]) == 0
    folder = tmp_path / ".github/workflows"
    (folder / "nightly.yml").write_text(f"# {HEADER}\nname: mine\n")
    (folder / "own.yml").write_text(f"# {HEADER}\nname: own\n")
    (folder / "weekly.yml").unlink()
    capsys.readouterr()
    assert main(["generate", "--check", "--root", str(tmp_path)]) == 7
    out = capsys.readouterr().out
    assert "-name: mine" in out
    assert "--- committed/.github/workflows/own.yml" in out
    assert "+name: Weekly" in out
    assert main(["generate", "--root", str(tmp_path)]) == 0
    assert not (folder / "own.yml").exists()


@pytest.mark.parametrize("name", ["release.yml", "own.yaml"])
def test_a_file_that_somebody_wrote_is_never_overwritten_or_removed(
    root: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(root / "registry.yaml", tmp_path)
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    (folder / name).write_text("name: mine\n")
    assert main(["generate", "--root", str(tmp_path)]) == 2
    assert f"not generated from the registry: {name}; nothing was written" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: "name: mine\n"}


@pytest.mark.parametrize("backends", [("cpu",), ("cpu", "cuda"), ("cpu", "rocm")])
def test_fleets_without_some_kind_of_device_are_generated_and_proven(fleet: Fleet, backends: tuple[str, ...]) -> None:
    suites = {name: suite for name, suite in fleet.suites.items() if suite.backend in backends}
    smaller = fleet.model_copy(update={"suites": suites})
    workflows = {Path(path).name: Workflow.from_text(text, path) for path, text in render(smaller).items()}
    assert lint(workflows) == []
    assert walk(workflows, smaller).violations == ()


def test_output_is_the_same_under_every_hash_seed(root: Path) -> None:
    script = "from miles_ci.registry import load_fleet; from miles_ci.workflows.generate import render; import hashlib; print(hashlib.sha256(repr(render(load_fleet('registry.yaml'))).encode()).hexdigest())"
    found = {
        subprocess.run([sys.executable, "-c", script], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("0", "1", "77")
    }  # fmt: skip
    assert len(found) == 1


def test_every_file_says_where_it_comes_from_and_reads_back_as_written(fleet: Fleet) -> None:
    for path, text in render(fleet).items():
        assert text.startswith("# Generated from registry.yaml by `miles-ci generate`."), path
        assert "\r" not in text
        assert parse_yaml(to_yaml(parse_yaml(text))) == parse_yaml(text)


def test_generation_and_own_lint_take_less_than_two_seconds(fleet: Fleet) -> None:
    start = time.process_time()
    workflows = {Path(path).name: Workflow.from_text(text, path) for path, text in render(fleet).items()}
    lint(workflows)
    assert time.process_time() - start < 2.0


def test_own_rules_find_nothing_in_what_we_generate(workflows: Mapping[str, Workflow]) -> None:
    assert lint(workflows) == []


def test_switching_pools_off_changes_no_file(root: Path, fleet: Fleet, tmp_path: Path) -> None:
    registry = yaml.safe_load((root / "registry.yaml").read_text())
    for pool in registry["pools"].values():
        pool["disabled"] = {"reason": "node is being re-imaged after Xid 79", "issue": "#123", "until": "2026-12-20"}
    (tmp_path / "registry.yaml").write_text(yaml.safe_dump(registry, sort_keys=False))
    assert render(load_fleet(tmp_path / "registry.yaml")) == render(fleet)


def test_a_suite_that_no_runner_can_take_is_refused(fleet: Fleet) -> None:
    pools = {name: pool.model_copy(update={"gpus_per_runner": 1}) for name, pool in fleet.pools.items()}
    with pytest.raises(UsageError, match="no pool carries the labels"):
        render(fleet.model_copy(update={"pools": pools}))


def test_an_action_outside_the_lock_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"not in actions\.lock\.yaml"):
        action("someone/else")


Change = Callable[[dict[str, Any]], Any]


def job(name: str, key: str, value: Any) -> Change:
    return lambda raw: raw["jobs"][name].__setitem__(key, value)


def step(name: str, at: int, key: str, value: Any) -> Change:
    return lambda raw: raw["jobs"][name]["steps"][at].__setitem__(key, value)


MUTANTS: list[tuple[str, str, Change]] = [
    ("status-sweeper.yml", "job-permissions", lambda raw: raw["jobs"]["sweep"].pop("permissions")),
    ("status-sweeper.yml", "top-permissions", lambda raw: raw.__setitem__("permissions", {"contents": "write"})),
    ("status-sweeper.yml", "timeout", lambda raw: raw["jobs"]["sweep"].pop("timeout-minutes")),
    ("status-sweeper.yml", "timeout", job("sweep", "timeout-minutes", 120)),
    ("status-sweeper.yml", "continue-on-error", job("sweep", "continue-on-error", True)),
    ("status-sweeper.yml", "shell", step("sweep", 2, "shell", "sh")),
    ("status-sweeper.yml", "shell", step("sweep", 2, "run", "echo hi\n")),
    ("status-sweeper.yml", "persist-credentials", lambda raw: raw["jobs"]["sweep"]["steps"][0]["with"].pop("persist-credentials")),
    ("status-sweeper.yml", "pin", step("sweep", 0, "uses", "actions/checkout@v7")),
    ("status-sweeper.yml", "pin", step("sweep", 0, "uses", "actions/checkout@" + "0" * 40)),
    ("status-sweeper.yml", "pin", step("sweep", 0, "uses", "someone/else@" + "0" * 40)),
    ("status-sweeper.yml", "privileged-checkout", step("sweep", 0, "with", {"persist-credentials": False, "ref": "${{ github.event.pull_request.head.sha }}"})),
    ("comment-gateway.yml", "expression-in-run", step("gateway", 4, "run", "set -euo pipefail\necho ${{ github.event.comment.body }}\n")),
    ("comment-gateway.yml", "queue-cancel", lambda raw: raw["concurrency"].__setitem__("cancel-in-progress", True)),
    ("comment-gateway.yml", "group-prefix", lambda raw: raw["concurrency"].__setitem__("group", "${{ github.workflow }}-1")),
    ("pr-test.yml", "secrets-inherit", job("stage-a-cpu", "secrets", "inherit")),
    ("pr-test.yml", "status-function", job("stage-b-cpu", "if", "needs.plan.result == 'success'")),
    ("pr-test.yml", "tests-failure", job("stage-b-cpu", "if", "!cancelled() && needs.stage-a-cpu.result == 'failure'")),
    ("pr-test.yml", "matrix-literal", lambda raw: raw["jobs"]["stage-a-cpu"]["strategy"].__setitem__("matrix", {"shard": [1, 2]})),
    ("pr-test.yml", "call-form", job("stage-a-cpu", "uses", "./.github/workflows/_run-cpu-ci.yml")),
    ("pr-test.yml", "call-input", lambda raw: raw["jobs"]["stage-a-cpu"]["with"].__setitem__("nonsense", "1")),
    ("pr-test.yml", "call-input", lambda raw: raw["jobs"]["stage-a-cpu"]["with"].pop("suite")),
    ("pr-test.yml", "required-check-needs", lambda raw: raw["jobs"]["required-check"]["needs"].remove("stage-b-cpu")),
    ("nightly.yml", "call", job("cuda", "permissions", {"contents": "read"})),
    ("_run-ci.yml", "privileged-container", lambda raw: raw["jobs"]["run"]["container"].__setitem__("options", "--privileged")),
    ("_run-ci.yml", "model-cache", lambda raw: raw["jobs"]["run"]["container"].__setitem__("volumes", ["/data/models:/models"])),
    ("_run-ci.yml", "workspace", lambda raw: raw["jobs"]["run"]["steps"].pop()),
    ("_run-ci.yml", "dependency-order", lambda raw: raw["jobs"]["run"]["steps"].insert(3, raw["jobs"]["run"]["steps"].pop(5))),
    ("_run-ci.yml", "unsafe-checkout", lambda raw: raw["jobs"]["run"]["steps"][1]["with"].__setitem__("allow-unsafe-pr-checkout", True)),
    ("_run-ci.yml", "one-job", lambda raw: raw["jobs"].__setitem__("twin", copy.deepcopy(raw["jobs"]["run"]))),
    ("pr-test-rocm.yml", "merge-ref", step("plan", 1, "with", {"persist-credentials": False, "ref": "refs/pull/1/merge"})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "code", "change"), MUTANTS, ids=[f"{code}-{at}" for at, (_, code, _) in enumerate(MUTANTS)]
)
def test_each_own_rule_catches_its_mutant(
    workflows: Mapping[str, Workflow], file: str, code: str, change: Change
) -> None:
    raw = copy.deepcopy(dict(workflows[file].raw))
    change(raw)
    findings = lint({**workflows, file: Workflow.from_dict(raw, file)})
    assert code in {finding.code for finding in findings}


def test_no_untrusted_context_reaches_a_script_or_a_secret_is_inherited(workflows: Mapping[str, Workflow]) -> None:
    for name, workflow in workflows.items():
        for place, text in all_strings(workflow.raw):
            if place.endswith(".run"):
                assert "${{" not in text, (name, place)
            if place.endswith("secrets"):
                assert text != "inherit"


def test_only_the_card_and_the_bots_see_secrets_and_no_test_job_does(workflows: Mapping[str, Workflow]) -> None:
    users = {
        name for name, workflow in workflows.items() for _, text in all_strings(workflow.raw) if "secrets." in text
    }
    assert users == {"approve-trusted.yml", "comment-gateway.yml", "status-card.yml", "status-sweeper.yml"}


def test_the_event_of_a_caller_is_never_used_to_infer_a_cadence(workflows: Mapping[str, Workflow]) -> None:
    for name in ("pr-test.yml", "pr-test-rocm.yml"):
        for place, text in all_strings(workflows[name].raw):
            assert "github.event_name == 'schedule'" not in text, (name, place)


def test_dependency_steps_come_after_checkout_in_the_order_checkout_check_apply_install(
    workflows: Mapping[str, Workflow],
) -> None:
    for name in ("_run-ci.yml", "_run-ci-rocm.yml"):
        ids = [step.get("id") or step["name"] for step in workflows[name].jobs["run"].steps]
        wanted = ["Check out", *(f"dependencies-{verb}" for verb in ("checkout", "check", "apply", "install")), "run"]
        assert [ids.index(entry) for entry in wanted] == sorted(ids.index(entry) for entry in wanted)


def test_rocm_shards_ask_for_the_runners_of_the_pool_at_run_time(
    workflows: Mapping[str, Workflow], fleet: Fleet
) -> None:
    stage = workflows["pr-test-rocm.yml"].jobs["stage-c-4-gpu-mi300x"]
    assert stage.raw["with"]["runs_on"] == "${{ toJSON(matrix.runs_on) }}"
    assert stage.strategy["fail-fast"] is False
    assert fleet.suites["stage-c-4-gpu-mi300x"].max_shards == fleet.suites["stage-c-4-gpu-mi300x"].min_shards == 2
    assert list(fleet.pools["mi300x-4gpu"].labels) == ["self-hosted", "amd", "mi300x", "4gpu"]
    options = workflows["_run-ci-rocm.yml"].jobs["run"].raw["container"]["options"]
    assert "--device /dev/kfd --device /dev/dri" in options


@pytest.mark.parametrize("tool", tools.TOOLS, ids=lambda tool: tool.__name__)
def test_the_official_tools_find_nothing(tool: Callable[..., tools.ToolReport], root: Path) -> None:
    report = tool(root, sorted((root / ".github/workflows").glob("*.yml")))
    if report.status == "not run":
        pytest.skip(report.detail)
    assert report.status == "clean", report.detail


@pytest.mark.skipif(node_tools.missing() is not None, reason=node_tools.missing() or "")
def test_the_official_parser_sees_the_same_jobs_and_needs(root: Path, workflows: Mapping[str, Workflow]) -> None:
    answers = node_tools.official_parse(sorted((root / ".github/workflows").glob("*.yml")))
    for path, answer in answers.items():
        mine = workflows[Path(path).name].jobs
        assert {name: entry["needs"] for name, entry in answer["jobs"].items()} == {
            name: list(job.needs) for name, job in mine.items()
        }


def test_a_tool_that_is_absent_is_reported_as_not_run(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(tools, "_program", lambda name: None)
    assert tools.zizmor(root, []).status == "not run"
