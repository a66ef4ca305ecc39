"""`miles-ci simulate-workflow` answers for events that can happen, and refuses what it cannot place."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_ci.cli import main
from miles_ci.workflows.events import EVENTS
from miles_ci.workflows.model import load_all
from tests.fast.ci.helpers.trees import REPOSITORY


def act(*arguments: str) -> int:
    return main(["simulate-workflow", "--root", str(REPOSITORY), *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--event", "nope"], "--event nope: GitHub has no such event"),
        (["--event", "pull_reqest"], "did you mean 'pull_request'?"),
        (["--event", "nope", "--workflow", "nightly.yml"], "GitHub has no such event"),
        (["--event", "schedule"], "starts no test workflow by itself; name one of nightly.yml"),
        (["--event", "fork"], "no workflow here runs on it"),
        (
            ["--event", "push", "--workflow", "nightly.yml"],
            "--event push: nightly.yml runs on schedule, workflow_dispatch; 'push' starts docker-build.yml",
        ),
        (["--event", "pull_request", "--count", "nope=3"], "--count nope: no such suite"),
        (["--event", "pull_request", "--count", "stage-a-cpu=x"], "--count stage-a-cpu=x: the number"),
        (["--event", "pull_request", "--count", "stage-a-cpu=-1"], "--count stage-a-cpu=-1: the number"),
        (["--event", "pull_request", "--input", "label=x"], "--input label: pr-test.yml has no such input; did you"),
        (["--event", "pull_request", "--payload", "registry.yaml"], "--payload registry.yaml: not JSON"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert act(*arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_payload_that_is_no_object_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "event.json").write_text("[1]")
    assert act("--event", "pull_request", "--payload", str(tmp_path / "event.json")) == 2
    assert "must hold a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--event", "merge_group"],
        ["--event", "pull_request_target"],
        ["--event", "workflow_dispatch", "--input", "labels=run-ci-kernels"],
        ["--event", "push", "--workflow", "release.yml"],
        ["--event", "schedule", "--workflow", "pr-test.yml"],
    ],
)
def test_events_that_start_or_reach_a_workflow_are_answered(arguments: list[str]) -> None:
    assert act(*arguments) == 0


def test_a_label_that_selects_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert act("--event", "pull_request", "--labels", "kernels") == 0
    assert (
        capsys.readouterr().err == "warning: label 'kernels' selects nothing; a run asks for it as 'run-ci-kernels'\n"
    )


def test_every_trigger_of_our_workflows_is_a_known_event() -> None:
    assert {str(trigger) for workflow in load_all(REPOSITORY).values() for trigger in workflow.on} <= EVENTS
