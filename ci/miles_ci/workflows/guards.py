"""Proof that no machine of ours takes code before the approval guard has passed, read from the files alone.

A leg is a job that can land on a machine that is not GitHub's own, directly or through the workflows it calls. A
guard is a job of default-branch code that asks `miles_ci.bot` about one exact commit. For every file that an event
can start: each leg needs a guard, its condition is false in every state in which no guard succeeded and reads nothing
but what other jobs reported, and it checks out exactly the commit that the guard names. The rules of `rules` are not
used: a leg with a wrong rule is found too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miles_ci.registry import Fleet
from miles_ci.registry.hosted import is_hosted
from miles_ci.workflows.expr import Env, ExpressionError, context_paths, interpolate
from miles_ci.workflows.expr.evaluate import expressions_in
from miles_ci.workflows.expr.syntax import Compare, Index, Literal, Logical, Node, parse
from miles_ci.workflows.expr.values import normalise
from miles_ci.workflows.model import Job, Workflow
from miles_ci.workflows.rules import State
from miles_ci.workflows.simulate import JOB_RESULTS, local_resolver
from miles_ci.workflows.walk import Violation, runs

_ASKS = re.compile(r"^python -m miles_ci bot (authorise|resolve)( |$)", re.MULTILINE)
DEFAULT_BRANCH = "${{ github.event.repository.default_branch }}"
WHY = "code reaches a machine of ours only behind the approval guard"


def is_guard(workflow: Workflow, job: Job) -> bool:
    """Whether a job decides about one commit with default-branch code, and without rights worth stealing."""
    writes = "write" in (workflow.permissions(job) or {"": "write"}).values()
    ours: object = None
    for step in job.steps:
        given = step.get("with") or {}
        if str(step.get("uses", "")).startswith("actions/checkout@") and "path" not in given:
            ours = given.get("ref")
        if _ASKS.search(str(step.get("run", ""))):
            unskippable = not step.get("if") and not step.get("continue-on-error")
            return ours == DEFAULT_BRANCH and unskippable and not writes
    return False


def lands_on_ours(job: Job, inputs: Mapping[str, Any]) -> bool:
    """Whether `runs-on` may name a machine of ours; what cannot be computed from literal inputs may."""
    wanted = job.raw.get("runs-on")
    if isinstance(wanted, str) and "${{" in wanted:
        known = {("inputs", name.lower()) for name in inputs}
        try:
            if not all(set(context_paths(parse(text))) <= known for text in expressions_in(wanted)):
                return True
            wanted = interpolate(wanted, Env({"inputs": normalise(dict(inputs))}))
        except ExpressionError:
            return True
    labels = [wanted] if isinstance(wanted, str) else wanted
    return not (isinstance(labels, list) and all(isinstance(x, str) for x in labels) and is_hosted(labels))


@dataclass(frozen=True)
class Leg:
    """A job of a file through which code may land on a machine of ours; `at` is the job where it does."""

    job: Job
    at: str


def open_legs(
    workflows: Mapping[str, Workflow], workflow: Workflow, inputs: Mapping[str, Any], fleet: Fleet
) -> list[Leg]:
    """Legs of a file that no guard of the file itself holds back, when it is called with these literal inputs."""
    return [leg for leg in _legs(workflows, workflow, inputs, fleet) if not _guards(workflow, leg.job)]


def _legs(
    workflows: Mapping[str, Workflow], workflow: Workflow, inputs: Mapping[str, Any], fleet: Fleet
) -> Iterator[Leg]:
    for job in workflow.jobs.values():
        if job.uses is None:
            if lands_on_ours(job, inputs):
                yield Leg(job, job.id)
            continue
        called = local_resolver(workflows)(job.uses)
        given = {k: v for k, v in (job.raw.get("with") or {}).items() if "${{" not in str(v)}
        for inner in open_legs(workflows, called, given, fleet):
            yield Leg(job, f"{job.id}/{inner.at}")


def _guards(workflow: Workflow, job: Job) -> list[str]:
    return sorted(name for name in workflow.closure(job.id) if is_guard(workflow, workflow.jobs[name]))


def prove_guards(workflows: Mapping[str, Workflow], fleet: Fleet) -> tuple[int, tuple[Violation, ...]]:
    """(number of legs, violations) over every file."""
    count, found = 0, []
    for name, workflow in workflows.items():
        starts = set(workflow.on) - {"workflow_call"}
        for leg in _legs(workflows, workflow, {}, fleet):
            guards = _guards(workflow, leg.job)
            if not guards and not starts:
                continue  # whoever calls this file holds it back, or is found
            count += 1
            problem, differences = _problem(workflow, leg.job, guards, fleet)
            if problem:
                condition = leg.job.condition or "(none: implicit success())"
                found.append(Violation(name, leg.at, False, f"{WHY}: {problem}", differences, condition))
    return count, tuple(found)


def _demands(tree: Node, guard: str) -> bool:
    """Whether the condition is `needs.GUARD.result == 'success' && …` at its outermost level."""
    parts = tree.args if isinstance(tree, Logical) and tree.operator == "&&" else (tree,)
    return any(
        isinstance(part, Compare)
        and part.operator == "=="
        and Literal("success") in (part.left, part.right)
        and set(context_paths(part)) == {("needs", guard.lower(), "result")}
        and isinstance(part.left if part.right == Literal("success") else part.right, Index)
        for part in parts
    )


def _problem(workflow: Workflow, job: Job, guards: list[str], fleet: Fleet) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What is wrong with a leg, and the state that shows it; empty when nothing is."""
    if not guards:
        return "it needs no guard", ()
    tree = job.tree()
    foreign = sorted({".".join(path) for path in context_paths(tree) if path[0] != "needs"}) if tree else []
    if foreign:
        return f"its condition reads {foreign[0]}, which is not for a leg to decide by", ()
    reference = str((job.raw.get("with") or {}).get("ref", ""))
    if reference not in {f"${{{{ needs.{guard}.outputs.sha }}}}" for guard in guards}:
        return f"it checks out {reference or 'the event’s commit'!r} and not the commit that {guards[0]} names", ()
    if tree is not None and any(_demands(tree, guard) for guard in guards):
        return "", ()  # one outermost conjunct settles it
    # A status function can make any needed job matter; what the condition does not read cannot change the rest.
    read = {path[1] for path in context_paths(tree) if len(path) > 2 and path[2] == "result"} if tree else set()
    names = sorted(name for name in workflow.closure(job.id) if name.lower() in read or name in guards)
    selected = (*fleet.suites, "cpu", "cuda", "rocm")
    for results in itertools.product(JOB_RESULTS, repeat=len(names)):
        assigned = dict(zip(names, results, strict=True))
        if any(assigned[guard] == "success" for guard in guards):
            continue
        for none, bypass, image, cancelled in itertools.product((False, True), repeat=4):
            state = State(assigned, dict.fromkeys(selected, 0 if none else 1), "regular", bypass, image, cancelled)
            if runs(workflow, job, state, fleet):
                shown = [(f"needs.{name}.result", result) for name, result in assigned.items() if result != "success"]
                return "it runs although no guard succeeded", tuple(shown)
    return "", ()
