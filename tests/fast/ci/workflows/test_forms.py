"""Every form of a key that GitHub's own parser accepts is read with the same meaning, or refused by name."""

from __future__ import annotations

import pytest

from miles_ci.workflows import lint, node_tools
from miles_ci.workflows.model import Workflow, WorkflowError, load_all
from miles_ci.workflows.simulate import Event, simulate
from miles_ci.workflows.tools import run_tools

FORM = "{top}on: push\njobs:\n  one:\n    runs-on: x\n{body}    steps: [{{run: a}}]\n"


def text(body: str = "", top: str = "") -> str:
    return FORM.format(top=top, body=f"    {body}\n" if body else "")


CONDITIONS = {
    "plain": ("if: github.ref == 'r'", "github.ref == 'r'"),
    "braces": ("if: ${{ github.ref == 'r' }}", "github.ref == 'r'"),
    "block without braces": ("if: |\n      github.ref == 'r'\n", "github.ref == 'r'"),
    "empty": ("if: ''", None),
    "nothing": ("if:", None),
    "only a line end": ("if: |\n\n", None),
    "yaml true": ("if: TRUE", "true"),
    "number": ("if: 1", "1"),
    "braces inside a string": ("if: ${{ 'a}}b' == github.ref }}", "'a}}b' == github.ref"),
}
ALWAYS_TRUE = {
    "line end after braces": "if: |\n      ${{ github.ref == 'r' }}\n",
    "block that drops its line end": "if: |-\n      ${{ github.ref == 'r' }}\n",
    "folded": "if: >-\n      ${{ github.ref == 'r' }}\n",
    "space after": "if: \"${{ github.ref == 'r' }} \"",
    "space before": "if: \" ${{ github.ref == 'r' }}\"",
    "two": "if: ${{ github.ref }}${{ github.ref }}",
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_condition_is_read(name):
    body, expected = CONDITIONS[name]
    assert Workflow.from_text(text(body)).jobs["one"].condition == expected


@pytest.mark.parametrize("name", ALWAYS_TRUE)
def test_condition_that_is_always_true_is_refused(name):
    with pytest.raises(WorkflowError, match="always true"):
        Workflow.from_text(text(ALWAYS_TRUE[name]))


def test_official_parser_reads_the_same_conditions(tmp_path):
    if node_tools.missing():
        pytest.skip(node_tools.missing())
    expected = {}
    for at, (body, condition) in enumerate(CONDITIONS.values()):
        (tmp_path / f"{at}.yml").write_text(text(body))
        expected[f"{at}.yml"] = "success()" if condition is None else f"success() && ({condition})"
    for at, body in enumerate(ALWAYS_TRUE.values()):
        (tmp_path / f"true-{at}.yml").write_text(text(body))
    answers = node_tools.official_parse(sorted(tmp_path.iterdir()))
    read = {path.rpartition("/")[2]: answer["jobs"]["one"]["if"] for path, answer in answers.items()}
    assert {name: read[name] for name in expected} == expected
    assert all("format(" in read[f"true-{at}.yml"] for at in range(len(ALWAYS_TRUE)))


@pytest.mark.parametrize(
    ("top", "body"),
    [
        ("concurrency: group\n", "concurrency: other"),
        ("concurrency: ${{ github.ref }}\n", ""),
        ("", "container: ubuntu"),
        ("", "container: ''"),
        ("permissions: write-all\n", "permissions: read-all"),
        ("", "strategy: ${{ fromJSON('{}') }}"),
        ("", "strategy: {fail-fast: '${{ true }}', max-parallel: '${{ 2 }}', matrix: {a: [1, 2]}}"),
        ("", "timeout-minutes: 1.5"),
    ],
)
def test_string_forms_are_linted_and_simulated(top, body):
    workflow = Workflow.from_text(text(body, top))
    lint.lint({"a.yml": workflow})
    assert simulate(workflow, Event("push"))["one"].result == "success"


def test_short_forms_mean_the_long_ones():
    workflow = Workflow.from_text(text("container: ubuntu", "concurrency: group\npermissions: write-all\n"))
    job = workflow.jobs["one"]
    assert workflow.concurrency == {"group": "group"}
    assert job.container == {"image": "ubuntu"}
    assert set((workflow.permissions(job) or {}).values()) == {"write"}
    assert "write" not in (Workflow.from_text(text("permissions: read-all")).permissions(job) or {}).values()
    assert lint.is_privileged(workflow, job)
    strategy = 'strategy: >-\n      ${{ fromJSON(\'{"matrix": {"a": [1, 2, 3]}}\') }}'
    assert len(simulate(Workflow.from_text(text(strategy)), Event("push"))["one"].legs) == 3


@pytest.mark.parametrize(
    ("top", "body", "message"),
    [
        ("permissions: all\n", "", "'all' is neither"),
        ("permissions:\n", "", "None is neither"),
        ("", "permissions: {contents: admin}", "contents: admin is neither"),
        ("", "if: fromJSON('')", "fromJSON: empty input"),
        ("", "strategy: ${{ fromJSON('') }}", "fromJSON: empty input"),
        ("", "strategy: {matrix: \"${{ fromJSON('') }}\"}", "fromJSON: empty input"),
        ("", "strategy: {matrix: {a: \"${{ fromJSON('') }}\"}}", "fromJSON: empty input"),
        ("", "strategy: {matrix: {a: abc}}", "matrix.a must be a list"),
        ("", "strategy: {matrix: {include: [1]}}", "matrix.include must be a list of mappings"),
        ("", "strategy: {max-parallel: '${{ 0 }}', matrix: {a: [1]}}", "max-parallel must be a number above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(top, body, message):
    with pytest.raises(WorkflowError, match=message):
        simulate(Workflow.from_text(text(body, top)), Event("push"))


def test_both_endings_are_workflows_for_lint_and_official_tools(tmp_path):
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "a.yml").write_text(text())
    (folder / "b.yaml").write_text(text("uses: nothing at all"))
    (folder / "notes.txt").write_text("no workflow")
    assert sorted(load_all(tmp_path)) == ["a.yml", "b.yaml"]
    assert any("b.yaml" in report.detail for report in run_tools(tmp_path) if report.status == "findings")
