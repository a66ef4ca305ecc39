"""Each rule of GitHub's job semantics, on the smallest workflow that shows it."""

from __future__ import annotations

import pytest

from miles_ci.workflows.model import Workflow, WorkflowError
from miles_ci.workflows.simulate import Event, Outcome, expand_matrix, local_resolver, simulate


def wf(jobs: str, on: str = "push") -> Workflow:
    return Workflow.from_text(f"on: {on}\njobs:\n" + "\n".join(f"  {line}" for line in jobs.strip().splitlines()))


def results(jobs: str, given: dict[str, Outcome | str] | None = None, *, cancelled: bool = False) -> dict[str, str]:
    return {name: state.result for name, state in simulate(wf(jobs), Event("push", cancelled=cancelled), given).items()}


CHAIN = "a: {runs-on: x}\nb: {runs-on: x, needs: a}\nc: {runs-on: x, needs: b}"


@pytest.mark.parametrize("bad", ["failure", "cancelled", "skipped"])
def test_without_an_if_a_job_runs_only_when_everything_before_succeeded(bad: str) -> None:
    assert results(CHAIN) == {"a": "success", "b": "success", "c": "success"}
    assert results(CHAIN, {"a": bad}) == {"a": bad, "b": "skipped", "c": "skipped"}


def test_an_if_without_status_function_still_waits_for_success() -> None:
    jobs = "a: {runs-on: x}\nb: {runs-on: x, needs: a, if: \"'x' == 'x'\"}"
    assert results(jobs, {"a": "failure"})["b"] == "skipped"


@pytest.mark.parametrize(
    "text", ["'always()' != ''", "github.x == 'always()' || true", "contains('success() failure()', 'x') || true"]
)
def test_a_status_function_inside_a_string_does_not_remove_the_implicit_gate(text: str) -> None:
    jobs = f'a: {{runs-on: x}}\nb: {{runs-on: x, needs: a, if: "{text}"}}'
    assert results(jobs, {"a": "failure"})["b"] == "skipped"
    assert not wf(jobs).jobs["b"].states_status


def test_a_yaml_comment_is_not_part_of_the_condition() -> None:
    workflow = wf("a: {runs-on: x}\nb:\n  runs-on: x\n  needs: a\n  if: true  # always()")
    assert simulate(workflow, Event("push"), {"a": "failure"})["b"].result == "skipped"


def test_failure_looks_at_the_whole_chain_and_success_or_failure_is_false_after_a_skip() -> None:
    jobs = "a: {runs-on: x}\nb: {runs-on: x, needs: a, if: always()}\nc: {runs-on: x, needs: b, if: failure()}\nd: {runs-on: x, needs: b, if: success() || failure()}"
    assert results(jobs, {"a": "failure"}) == {"a": "failure", "b": "success", "c": "success", "d": "success"}
    assert results(jobs, {"a": "skipped"}) == {"a": "skipped", "b": "success", "c": "skipped", "d": "skipped"}


def test_cancelled_means_the_run_and_not_a_needed_job() -> None:
    jobs = 'a: {runs-on: x}\nb: {runs-on: x, needs: a, if: cancelled()}\nc: {runs-on: x, needs: a, if: "!cancelled()"}\nd: {runs-on: x, needs: a, if: always()}'
    assert results(jobs, {"a": "cancelled"}) == {"a": "cancelled", "b": "skipped", "c": "success", "d": "success"}
    got = results(jobs, cancelled=True)
    assert (got["b"], got["c"], got["d"]) == ("success", "skipped", "success")


def test_a_skipped_jobs_outputs_are_empty_strings() -> None:
    jobs = "a: {runs-on: x, if: false, outputs: {n: '1'}}\nb: {runs-on: x, needs: a, if: \"always() && needs.a.outputs.n == ''\"}"
    states = simulate(wf(jobs), Event("push"))
    assert states["a"].outputs == {"n": ""}
    assert states["b"].result == "success"


def test_runner_491_a_skipped_grandparent_skips_although_the_parent_succeeded() -> None:
    jobs = "skip: {runs-on: x, if: false}\nparent: {runs-on: x, needs: skip, if: always()}\nchild: {runs-on: x, needs: parent}"
    assert results(jobs) == {"skip": "skipped", "parent": "success", "child": "skipped"}


def test_runner_2205_stating_the_parents_result_with_a_status_function_runs_the_child() -> None:
    jobs = "skip: {runs-on: x, if: false}\nparent: {runs-on: x, needs: skip, if: always() && needs.skip.result != 'failure'}\nchild: {runs-on: x, needs: parent, if: \"always() && needs.parent.result == 'success'\"}"
    assert results(jobs)["child"] == "success"


def test_runner_2227_one_skipped_need_among_several_skips_a_job_without_status_function() -> None:
    jobs = 'a: {runs-on: x}\nb: {runs-on: x, if: false}\nc: {runs-on: x, needs: [a, b]}\nd: {runs-on: x, needs: [a, b], if: "!failure() && !cancelled()"}'
    assert results(jobs) == {"a": "success", "b": "skipped", "c": "skipped", "d": "success"}


def test_matrix_condition_comes_before_expansion_and_an_empty_matrix_is_an_error() -> None:
    jobs = "a: {runs-on: x, if: false, strategy: {matrix: {n: []}}}\nb: {runs-on: x, strategy: {matrix: {n: []}}}"
    states = simulate(wf(jobs), Event("push"))
    assert states["a"].result == "skipped"
    assert (states["b"].result, states["b"].reason) == ("failure", "error: the matrix has no values")


def test_fail_fast_cancels_siblings_and_without_it_they_end_by_themselves() -> None:
    legs = {"a": Outcome(legs=("success", "failure", "success"))}
    fast = simulate(wf("a: {runs-on: x, strategy: {max-parallel: 2, matrix: {n: [1, 2, 3]}}}"), Event("push"), legs)[
        "a"
    ]
    assert (fast.result, fast.legs) == ("failure", ("success", "failure", "cancelled"))
    assert fast.reason == "ran 3 legs, at most 2 at once"
    slow = simulate(wf("a: {runs-on: x, strategy: {fail-fast: false, matrix: {n: [1, 2, 3]}}}"), Event("push"), legs)[
        "a"
    ]
    assert (slow.result, slow.legs) == ("failure", ("success", "failure", "success"))


def test_matrix_include_extends_what_it_does_not_contradict_and_adds_the_rest() -> None:
    matrix = {"os": ["a", "b"], "exclude": [{"os": "b"}], "include": [{"os": "a", "x": 1}, {"os": "c"}]}
    assert expand_matrix(matrix) == [{"os": "a", "x": 1}, {"os": "c"}]


CALLEE = """
on: {workflow_call: {inputs: {n: {type: string, required: true}}, outputs: {o: {value: "${{ jobs.p.outputs.v }}-${{ inputs.n }}"}}}}
permissions: {contents: read}
jobs:
  p: {runs-on: x, outputs: {v: '1'}}
  q: {runs-on: x, needs: p}
"""


def call(jobs: str, given: dict[str, Outcome | str] | None = None) -> dict:
    called = Workflow.from_text(CALLEE, "callee.yml")
    return simulate(wf(jobs), Event("schedule"), given, resolve=local_resolver({"callee.yml": called}))


def test_a_call_has_the_worst_inner_result_and_the_declared_outputs() -> None:
    jobs = "a: {permissions: {contents: read}, uses: $/.github/workflows/callee.yml, with: {n: '7'}}\nb: {runs-on: x, needs: a, if: \"always() && needs.a.outputs.o == '5-7'\"}"
    states = call(jobs, {"a/p": Outcome(outputs={"v": "5"}), "a/q": "cancelled"})
    assert states["a"].result == "cancelled"
    assert states["b"].result == "success"
    assert call(jobs, {"a/p": "failure"})["a"].result == "failure"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            "a: {permissions: {}, uses: ./.github/workflows/callee.yml, with: {n: x}}",
            "grants contents: none, but callee.yml job p asks for read",
        ),
        ("a: {permissions: {contents: read}, uses: ./.github/workflows/callee.yml}", "required input 'n' is not given"),
        (
            "a: {permissions: {contents: read}, uses: ./.github/workflows/callee.yml, with: {n: x, m: y}}",
            "has no input 'm'",
        ),
        ("a: {permissions: {contents: read}, uses: ./.github/workflows/none.yml}", "none.yml does not exist"),
    ],
)
def test_what_github_refuses_at_start_is_an_error(job: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message.replace("(", r"\(")):
        call(job)


def test_calls_nest_at_most_four_deep() -> None:
    files = {
        f"{n}.yml": Workflow.from_text(
            f"on: workflow_call\njobs: {{j: {{uses: ./.github/workflows/{n + 1}.yml}}}}", f"{n}.yml"
        )
        for n in range(5)
    }
    files["5.yml"] = Workflow.from_text("on: workflow_call\njobs: {j: {runs-on: x}}", "5.yml")
    resolve = local_resolver(files)
    assert simulate(files["1.yml"], Event("push"), resolve=resolve)["j"].result == "success"
    with pytest.raises(WorkflowError, match="deeper than 4"):
        simulate(files["0.yml"], Event("push"), resolve=resolve)


@pytest.mark.parametrize("text", ["secrets.X == 'a'", "unknown()", "steps.a.outcome", "hashFiles('x')"])
def test_a_context_or_function_not_available_in_a_job_condition_is_an_error(text: str) -> None:
    with pytest.raises(WorkflowError, match="job a: if:"):
        wf(f'a: {{runs-on: x, if: "{text}"}}')


def test_text_around_an_expression_is_refused_because_it_is_always_true() -> None:
    with pytest.raises(WorkflowError, match="always true"):
        wf('a: {runs-on: x, if: "${{ false }} "}\nb: {runs-on: x, if: "x ${{ false }}"}')


def test_the_reason_shows_the_values_that_were_read() -> None:
    state = simulate(
        wf("a: {runs-on: x}\nb: {runs-on: x, needs: a, if: \"!cancelled() && needs.a.result == 'success'\"}"),
        Event("push"),
        {"a": "failure"},
    )["b"]
    assert state.reason == "if is false: needs.a.result == 'success' [needs.a.result='failure']"


def test_a_needs_cycle_and_an_unknown_need_are_errors() -> None:
    with pytest.raises(WorkflowError, match="cycle among"):
        wf("a: {runs-on: x, needs: b}\nb: {runs-on: x, needs: a}")
    with pytest.raises(WorkflowError, match="needs 'z'"):
        wf("a: {runs-on: x, needs: z}")
