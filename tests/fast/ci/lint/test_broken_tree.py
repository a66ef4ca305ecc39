"""A tree with 25 planted errors: one report has them all, each with its place; nothing else suffers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.lint import lint
from miles_ci.plan.build import build_plan
from miles_ci.plan.durations import Durations
from miles_ci.select.policy import Policy
from miles_ci.select.selection import select
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY, cpu, cuda, workspace, write_tree

LATE = '{"reason": "a reason of length", "issue": "#1", "until": "2027-06-01"}'
GONE = '{"reason": "a reason of length", "issue": "#1", "until": "2026-10-01"}'

# path -> (source, the text at which the finding points, code, words of the message)
PLANTED: dict[str, tuple[str | bytes, str, str, str]] = {
    "tests/e2e/test_01.py": (cpu(suite="stage-b-cpus"), '"stage-b-cpus"', "unknown-suite", "did you mean 'stage-b-cpu'?"),
    "tests/e2e/test_02.py": (cpu(suite="stage-b-1-gpu-h200"), '"stage-b-1', "wrong-backend", "is a cuda suite"),
    "tests/e2e/test_03.py": (cuda(hardware="h20"), '["h20"]', "unknown-hardware", "did you mean 'h200'?"),
    "tests/e2e/test_04.py": (cuda(hardware="h100"), '["h100"]', "hardware-not-covered", "does not cover h200"),
    "tests/e2e/test_05.py": (cuda(num_gpus="2"), "2)", "too-many-gpus", "more than the 1"),
    "tests/e2e/test_06.py": (cuda(min_memory_gib="500"), "500", "too-much-memory", "any eligible model has (139)"),
    "tests/e2e/test_07.py": (cuda(labels='["kernel"]'), '["kernel"]', "unknown-label", "did you mean 'kernels'?"),
    "tests/e2e/test_08.py": (cuda(labels='["run-ci-all"]'), '["run-ci-all"]', "wrong-label-kind", "is a scope label"),
    "tests/e2e/test_09.py": (cuda(labels="[]"), "[])", "missing-label", "at least one domain label"),
    "tests/e2e/test_10.py": (cuda(capabilities='["fp9"]'), '["fp9"]', "unknown-capability", "did you mean 'fp8'?"),
    "tests/e2e/test_11.py": (cuda(capabilities='["rdma"]'), '["rdma"]', "unmet-capability", "no pool of 'stage-b-1-gpu-h200'"),
    "tests/e2e/test_12.py": (cuda(disabled=LATE), LATE, "until-too-far", "at most 90"),
    "tests/e2e/test_13.py": (cuda(unstable=GONE), GONE, "until-expired", "passed 60 days ago"),
    "tests/e2e/test_14.py": (cpu(est_time="True"), "True", "wrong-type", "must be a number, got True"),
    "tests/e2e/test_15.py": (cpu(est_time="TIME"), "TIME", "not-literal", "the name 'TIME'"),
    "tests/e2e/test_16.py": (cpu(lables='["data"]'), "lables", "unknown-field", "did you mean 'labels'?"),
    "tests/e2e/test_17.py": (cpu(hardware='["h200"]'), "hardware", "forbidden-field", "CPU suites have no devices"),
    "tests/e2e/test_18.py": (cpu() + 'register_cpu_ci(3, "stage-b-cpu")\n', "register_cpu_ci(3,", "duplicate-registration", "first in line 2"),
    "tests/e2e/test_19.py": (cpu() + "if True:\n    register_cpu_ci(4, 's')\n", "register_cpu_ci(4", "nested-call", "inside `if`"),
    "tests/e2e/test_20.py": (PLAIN, "def", "not-declared", "declares no suite"),
    "tests/e2e/test_21.py": (b"from miles_ci.declare import register_cpu_ci  # \xe9\n", "\xe9", "not-utf8", "0xe9"),
    "tests/e2e/test_22.py": ("from miles_ci.declare import register_cpu_ci\nregister_cpu_ci(\n", "(\n", "syntax-error", "does not parse"),
    "tests/e2e/more_tests.py": (PLAIN, "def", "misplaced-test", "test_it would never run"),
    "tests/e2e/test_24.py": ("from miles_ci.declare import register_cpu_ci as r\nr(3, 's')\n", "register_cpu_ci as", "aliased-import", "`register_cpu_ci as r`"),
    "tests/e2e/test_25.py": (cpu(timeout="5000"), "5000", "out-of-range", "exceeds test_timeout_s 1800"),
}  # fmt: skip


def place_of(source: str | bytes, at: str) -> tuple[int, int]:
    text = source.decode("latin-1") if isinstance(source, bytes) else source
    offset = text.index(at)
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


SOUND = {
    "tests/fast/test_sound.py": PLAIN,
    "tests/e2e/test_sound.py": cuda("stage-c-4-gpu-h200", num_gpus="4"),
    "tests/e2e/test_sound_cpu.py": cpu(),
}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write_tree(tmp_path, {**SOUND, **{path: case[0] for path, case in PLANTED.items()}})


def test_all_25_errors_are_in_one_report_each_with_place_and_hint(broken: Path) -> None:
    assert len(PLANTED) == 25
    found = {(item.path, item.code): item for item in lint(workspace(broken)).errors}
    missing = []
    for path, (source, at, code, words) in PLANTED.items():
        place = place_of(source, at)
        item = found.get((path, code))
        if item is None or (item.line, item.column) != place or words not in item.message:
            missing.append((path, code, place, words, [other.text() for other in found.values() if other.path == path]))
    assert missing == []


def test_the_report_is_sorted_and_names_no_sound_file(broken: Path) -> None:
    findings = lint(workspace(broken)).findings
    assert list(findings) == sorted(findings)
    assert not {item.path for item in findings} & set(SOUND)


def test_sound_tests_of_every_suite_still_plan_and_each_faulty_file_is_one_failed_entry(broken: Path) -> None:
    space = workspace(broken)
    selection = select(space.catalog, space.fleet, Policy.resolve(space.fleet, "weekly"), today=space.today)
    plan = build_plan(space.catalog, space.fleet, selection, Durations())
    first = plan.shard("stage-a-cpu", 1)
    failed = [unit for unit in first.units if unit.kind == "declaration-error"]
    # A date that has passed is a lint error, not a broken declaration: that test still runs.
    assert [unit.id for unit in failed] == [
        f"declaration::{path}" for path in sorted(PLANTED) if path != "tests/e2e/test_13.py"
    ]
    assert all(unit.errors for unit in failed)
    run = {unit.path for shard in plan.shards for unit in shard.units if unit.kind == "test"}
    assert run == {*SOUND, "tests/e2e/test_13.py"}


def miles_ci(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_ci", *arguments, "--root", str(root), "--today", "2026-11-30"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_the_command_ends_with_2_and_prints_text_json_or_annotations(broken: Path) -> None:
    write = miles_ci(broken, "lint", "--write-schema")
    text, data, annotations = (miles_ci(broken, "lint", "--format", form) for form in ("text", "json", "github"))
    assert {done.returncode for done in (write, text, data, annotations)} == {2}
    assert (
        "tests/e2e/test_03.py:2:55: error[unknown-hardware] hardware: 'h20' is not known; did you mean 'h200'?"
        in text.stdout
    )
    report = json.loads(data.stdout)
    assert {item["path"] for item in report["findings"]} == set(PLANTED)
    assert report["errors"] == len(report["findings"])
    assert (
        "::error file=tests/e2e/test_03.py,line=2,col=55,title=unknown-hardware::hardware: 'h20'" in annotations.stdout
    )


def test_errors_of_the_registry_and_of_the_tests_come_in_the_same_report(broken: Path) -> None:
    registry = (broken / "registry.yaml").read_text().replace("tier: a", "tier: d")
    (broken / "registry.yaml").write_text(registry)
    report = lint(workspace(broken))
    codes = {item.code for item in report.errors}
    assert {"unknown-value", "not-literal", "not-declared", "not-utf8"} <= codes
    assert any("registry has errors" in reason for reason in report.not_run)


def test_schema_drift_and_a_corrupt_duration_table_are_errors(tmp_path: Path) -> None:
    write_tree(tmp_path, {**SOUND, "docs/reference/registry.schema.json": "{}", "tests/durations.json": "{"})
    assert {item.code for item in lint(workspace(tmp_path)).errors} == {"schema-drift", "durations"}


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_a_date_that_had_passed_when_it_was_introduced_is_an_error(tmp_path: Path) -> None:
    passed = '{"reason": "a reason of length", "issue": "#1", "until": "2026-11-20"}'
    write_tree(tmp_path, {"tests/e2e/test_old.py": cuda(disabled=passed)})
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    (tmp_path / "tests/e2e/test_new.py").write_text(cuda(disabled=passed))
    registry = (tmp_path / "registry.yaml").read_text()
    off = 'count: 8\n    disabled: {reason: "a reason of length", issue: "#1", until: 2026-11-20}'
    (tmp_path / "registry.yaml").write_text(registry.replace("count: 8", off, 1))
    found = [item for item in lint(workspace(tmp_path), base="HEAD").errors if item.code == "until-in-past"]
    assert [item.path for item in found] == ["registry.yaml", "tests/e2e/test_new.py"]
