"""What GitHub Actions would do: which jobs run, with which result, and why.

`simulate(workflow, event, results)` walks the jobs in order of need. `results` says how a job ends if it runs
(default success) and what it outputs; everything else follows from the rules: implicit `success()`, skipping,
matrices, reusable workflows, cancellation. Steps are not executed (see the act test for that).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_ci.workflows.emit import fold
from miles_ci.workflows.expr import (
    STATUS_FUNCTIONS,
    Env,
    ExpressionError,
    context_paths,
    interpolate,
    is_truthy,
    to_text,
)
from miles_ci.workflows.expr.values import normalise
from miles_ci.workflows.model import CALL_WITH, JOB_IF, STRATEGY, Job, Workflow, WorkflowError, compiled

JOB_RESULTS = ("success", "failure", "cancelled", "skipped")
MAX_CALL_DEPTH = 4
_WORST = {"skipped": 0, "success": 1, "cancelled": 2, "failure": 3}
_LEVEL = {"none": 0, "read": 1, "write": 2}


@dataclass(frozen=True)
class Event:
    """The event that started the run; `payload` is `github.event`, `github` adds or replaces fields."""

    name: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    vars: Mapping[str, Any] = field(default_factory=dict)
    github: Mapping[str, Any] = field(default_factory=dict)
    cancelled: bool = False

    def contexts(self) -> dict[str, Any]:
        github = {
            "event_name": self.name,
            "event": self.payload,
            "run_id": "1",
            "ref": "refs/heads/main",
            **self.github,
        }
        return {"github": normalise(github), "inputs": normalise(dict(self.inputs)), "vars": normalise(dict(self.vars))}


@dataclass(frozen=True)
class Outcome:
    """How a job ends if it runs. `legs`: one result for each matrix leg, in the order in which they end."""

    result: str = "success"
    outputs: Mapping[str, str] = field(default_factory=dict)
    legs: Sequence[str] = ()


@dataclass(frozen=True)
class JobState:
    """Result of one job and the reason, in words a person can act on."""

    result: str
    reason: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    legs: tuple[str, ...] = ()
    inner: Mapping[str, JobState] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return self.result != "skipped"


Resolver = Callable[[str], Workflow]


def status_of(
    closure: frozenset[str], states: Mapping[str, JobState], cancelled: bool
) -> dict[str, Callable[[], bool]]:
    """The four status functions for a job whose transitive needs are `closure`."""
    results = {states[name].result for name in closure}
    success, failure = results <= {"success"}, "failure" in results
    return {
        "success": lambda: success and not cancelled,
        "failure": lambda: failure,
        "cancelled": lambda: cancelled,
        "always": lambda: True,
    }


def simulate(
    workflow: Workflow,
    event: Event,
    results: Mapping[str, Outcome | str] | None = None,
    *,
    resolve: Resolver | None = None,
    explain: bool = True,
    _depth: int = 0,
    _prefix: str = "",
) -> dict[str, JobState]:
    """States of all jobs. `results` keys are job ids, `caller/inner` inside a reusable workflow.

    `resolve` loads a called local workflow (`./.github/workflows/x.yml`); without it calls are treated like
    plain jobs. `explain=False` leaves reasons of skipped jobs empty (they cost most of the time). Raises `WorkflowError` for what GitHub refuses at start (unknown input, depth, permissions).
    """
    base = event.contexts()
    states: dict[str, JobState] = {}
    for job_id in workflow.order:
        job = workflow.jobs[job_id]
        needs = {n: {"result": states[n].result, "outputs": dict(states[n].outputs)} for n in job.needs}
        env = Env({**base, "needs": needs}, status_of(workflow.closure(job_id), states, event.cancelled))
        run = _Run(workflow, job, event, env, results or {}, states, resolve, explain, _depth, _prefix)
        try:
            states[job_id] = run.state()
        except ExpressionError as error:
            raise WorkflowError(f"{workflow.path}: job {job_id}: {error}") from error
    return states


@dataclass(frozen=True)
class _Run:
    workflow: Workflow
    job: Job
    event: Event
    env: Env
    results: Mapping[str, Outcome | str]
    states: Mapping[str, JobState]
    resolve: Resolver | None
    explain: bool
    depth: int
    prefix: str

    def state(self) -> JobState:
        job = self.job
        if not is_truthy(job.effective_condition(self.env)):
            return JobState("skipped", self.why_not() if self.explain else "", self.empty_outputs())
        legs = self.expand()
        if legs is not None and not legs:
            return JobState("failure", "error: the matrix has no values", self.empty_outputs())
        if job.uses and job.uses.startswith(("./", "$/")) and self.resolve is not None:
            return self.call(legs)
        outcome = self.outcome()
        if legs is not None:
            return self.matrix(outcome, len(legs))
        outputs = self.empty_outputs() | dict(outcome.outputs)
        return JobState(outcome.result, "ran", outputs)

    def outcome(self) -> Outcome:
        given = self.results.get(self.prefix + self.job.id, Outcome())
        outcome = Outcome(given) if isinstance(given, str) else given
        if outcome.result not in JOB_RESULTS:
            raise WorkflowError(f"job {self.job.id}: {outcome.result!r} is not a result")
        return outcome

    def empty_outputs(self) -> dict[str, str]:
        return dict.fromkeys(self.job.raw.get("outputs") or {}, "")

    def why_not(self) -> str:
        """The condition with the values it read."""
        job = self.job
        if job.condition is None:
            bad = [f"{n} is {self.env.contexts['needs'][n]['result']}" for n in job.needs]
            return "implicit success(): " + (", ".join(bad) or "the run was cancelled")
        if self.event.cancelled:
            alive = status_of(self.workflow.closure(job.id), self.states, cancelled=False)
            if is_truthy(job.effective_condition(Env(self.env.contexts, alive))):
                return "the run was cancelled"
        implicit = "" if job.states_status else "implicit success() and "
        return f"if is false: {implicit}{false_part(job.condition, self.env)}"

    def expand(self) -> list[dict[str, Any]] | None:
        """Matrix legs, None without a matrix. Uses `include`/`exclude` as GitHub does for added legs."""
        raw = self.strategy.get("matrix")
        if raw is None:
            return None
        env = self.strategy_env
        try:
            matrix = interpolate(raw, env) if isinstance(raw, str) else raw
        except ExpressionError as error:
            raise WorkflowError(f"{self.workflow.path}: job {self.job.id}: matrix {raw}: {error}") from error
        if not isinstance(matrix, dict):
            raise WorkflowError(f"job {self.job.id}: matrix must be an object, got {to_text(matrix)!r}")
        return expand_matrix({key: interpolate(value, env) for key, value in matrix.items()})

    @property
    def strategy_env(self) -> Env:
        return Env({name: self.env.contexts[name] for name in STRATEGY if name in self.env.contexts})

    @functools.cached_property
    def strategy(self) -> Mapping[str, Any]:
        """With expressions evaluated, except the matrix, which `expand` reads."""
        stated = self.job.raw.get("strategy") or {}
        whole = isinstance(stated, str)
        try:
            if whole:
                stated = interpolate(stated, self.strategy_env)
            if not isinstance(stated, dict):
                raise WorkflowError(f"job {self.job.id}: strategy must be a mapping, got {to_text(stated)!r}")
            rest = {k: v if whole or k == "matrix" else interpolate(v, self.strategy_env) for k, v in stated.items()}
        except ExpressionError as error:
            raise WorkflowError(f"{self.workflow.path}: job {self.job.id}: strategy: {error}") from error
        limit = rest.get("max-parallel")
        if limit is not None and not (isinstance(limit, int | float) and limit >= 1):
            raise WorkflowError(f"job {self.job.id}: max-parallel must be a number above 0, got {to_text(limit)!r}")
        return rest

    def matrix(self, outcome: Outcome, count: int) -> JobState:
        given = list(outcome.legs) or [outcome.result] * count
        if len(given) != count:
            raise WorkflowError(f"job {self.job.id}: {len(given)} leg results for {count} legs")
        legs = matrix_results(given, fail_fast=self.strategy.get("fail-fast", True) is not False)
        limit = self.strategy.get("max-parallel") or count
        outputs = self.empty_outputs() | dict(outcome.outputs)
        return JobState(
            worst(legs), f"ran {count} legs, at most {min(int(limit), count)} at once", outputs, tuple(legs)
        )

    def call(self, legs: list[dict[str, Any]] | None) -> JobState:
        """Run the called workflow once for each leg; the worst inner result counts."""
        assert self.resolve is not None
        assert self.job.uses is not None
        if self.depth + 1 > MAX_CALL_DEPTH:
            raise WorkflowError(f"{self.workflow.path}: job {self.job.id}: calls nest deeper than {MAX_CALL_DEPTH}")
        called = self.resolve(self.job.uses)
        check_permissions(self.workflow, self.job, called)
        given = self.results.get(self.prefix + self.job.id)
        merged: dict[str, JobState] = {}
        leg_results: list[str] = []
        inputs: dict[str, Any] = {}
        for at, leg in enumerate(legs or [{}]):
            inputs = self.call_inputs(called, leg)
            event = Event(
                self.event.name, self.event.payload, inputs, self.event.vars, self.event.github, self.event.cancelled
            )
            results = self.inner_results(called, given, at)
            inner = simulate(
                called,
                event,
                results,
                resolve=self.resolve,
                explain=self.explain,
                _depth=self.depth + 1,
                _prefix=f"{self.prefix}{self.job.id}/",
            )
            leg_results.append(worst([state.result for state in inner.values()]))
            merged |= {f"{name}[{at}]" if legs is not None else name: state for name, state in inner.items()}
        if legs is not None:
            leg_results = matrix_results(leg_results, fail_fast=self.strategy.get("fail-fast", True) is not False)
        outputs = self.call_outputs(called, merged if legs is None else {}, inputs)
        return JobState(
            worst(leg_results), f"called {called.path}", outputs, tuple(leg_results if legs else ()), merged
        )

    def inner_results(self, called: Workflow, given: Outcome | str | None, at: int) -> dict[str, Outcome | str]:
        """A result given for the caller itself applies to every inner job that was not given its own."""
        results = dict(self.results)
        if given is not None:
            outcome = Outcome(given) if isinstance(given, str) else given
            result = outcome.legs[at] if outcome.legs else outcome.result
            for name in called.jobs:
                results.setdefault(f"{self.prefix}{self.job.id}/{name}", Outcome(result, outcome.outputs))
        return results

    def call_inputs(self, called: Workflow, leg: Mapping[str, Any]) -> dict[str, Any]:
        declared, given = called.call_inputs(), self.job.raw.get("with") or {}
        unknown = sorted(set(given) - set(declared))
        if unknown:
            raise WorkflowError(f"{self.workflow.path}: job {self.job.id}: {called.path} has no input {unknown[0]!r}")
        names = CALL_WITH & ({*self.env.contexts} | {"matrix"})
        env = Env(
            {**{n: self.env.contexts[n] for n in names if n in self.env.contexts}, "matrix": normalise(dict(leg))}
        )
        inputs: dict[str, Any] = {}
        for name, spec in declared.items():
            if name in given:
                inputs[name] = interpolate(given[name], env)
            elif spec.get("required"):
                raise WorkflowError(f"{self.workflow.path}: job {self.job.id}: required input {name!r} is not given")
            else:
                inputs[name] = spec.get("default", {"boolean": False, "number": 0}.get(spec.get("type", "string"), ""))
        return inputs

    def call_outputs(
        self, called: Workflow, inner: Mapping[str, JobState], inputs: Mapping[str, Any]
    ) -> dict[str, str]:
        declared = (called.on.get("workflow_call") or {}).get("outputs") or {}
        jobs = {name: {"result": state.result, "outputs": dict(state.outputs)} for name, state in inner.items()}
        around = {name: self.env.contexts[name] for name in ("github", "vars")}
        env = Env({**around, "inputs": normalise(dict(inputs)), "jobs": normalise(jobs)})
        return {name: to_text(interpolate(spec["value"], env)) for name, spec in declared.items()}


def false_part(condition: str, env: Env) -> str:
    """The first outermost conjunct that is false, with the values it read; the whole when none stands alone."""
    parts = [part.removesuffix(" &&") for part in fold(condition)]
    whole = len(parts) == 1 or any(part.endswith(" ||") for part in parts)
    for part in [condition] if whole else parts:
        tree, evaluate = compiled(part, JOB_IF, STATUS_FUNCTIONS)
        if not is_truthy(evaluate(env)):
            paths = sorted(path for path in context_paths(tree) if "*" not in path)
            values = [f"{'.'.join(path)}={to_text(_read(env.contexts, path))!r}" for path in paths]
            return f"{part} [{', '.join(values)}]"
    return condition


def _read(contexts: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = contexts
    for part in path:
        if not isinstance(value, Mapping):
            return None
        value = {str(k).lower(): v for k, v in value.items()}.get(part)
    return value


def worst(results: Sequence[str]) -> str:
    """failure > cancelled > success > skipped; nothing at all is skipped."""
    return max(results, key=_WORST.__getitem__, default="skipped")


def matrix_results(legs: Sequence[str], *, fail_fast: bool) -> list[str]:
    """Legs in order of their end: with fail-fast, everything after the first failure is cancelled."""
    if not fail_fast or "failure" not in legs:
        return list(legs)
    first = list(legs).index("failure")
    return [*legs[: first + 1], *["cancelled"] * (len(legs) - first - 1)]


def expand_matrix(matrix: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cartesian product, minus `exclude`, plus `include` (which extends legs it does not contradict)."""
    for key, value in matrix.items():
        rows = key in ("include", "exclude")
        if not isinstance(value, list) or (rows and not all(isinstance(row, dict) for row in value)):
            raise WorkflowError(f"matrix.{key} must be a list{' of mappings' if rows else ''}, got {to_text(value)!r}")
    axes = {key: list(value) for key, value in matrix.items() if key not in ("include", "exclude")}
    legs: list[dict[str, Any]] = [{}] if axes else []
    for key, values in axes.items():
        legs = [{**leg, key: value} for leg in legs for value in values]
    excluded = matrix.get("exclude") or []
    legs = [leg for leg in legs if not any(all(leg.get(k) == v for k, v in rule.items()) for rule in excluded)]
    product = [dict(leg) for leg in legs]
    for extra in matrix.get("include") or []:
        fits = [i for i, leg in enumerate(product) if all(leg[k] == v for k, v in extra.items() if k in axes)]
        if fits and axes:
            for at in fits:
                legs[at] = {**legs[at], **extra}
        else:
            legs.append(dict(extra))
    return legs


def check_permissions(workflow: Workflow, job: Job, called: Workflow) -> None:
    """A called workflow's jobs may ask for at most what the calling job has."""
    have = workflow.permissions(job)
    if have is None:
        return
    for inner in called.jobs.values():
        for scope, level in (called.permissions(inner) or {}).items():
            if _LEVEL[level] > _LEVEL[have.get(scope, "none")]:
                raise WorkflowError(
                    f"{workflow.path}: job {job.id} grants {scope}: {have.get(scope, 'none')}, "
                    f"but {called.path} job {inner.id} asks for {level}"
                )


def local_resolver(workflows: Mapping[str, Workflow]) -> Resolver:
    """Resolve `./.github/workflows/NAME` among loaded files."""

    def resolve(uses: str) -> Workflow:
        name = uses[2:].removeprefix(".github/workflows/")
        if name not in workflows:
            raise WorkflowError(f"{uses} does not exist; present: {', '.join(sorted(workflows))}")
        return workflows[name]

    return resolve


__all__ = [
    "JOB_IF",
    "Event",
    "JobState",
    "Outcome",
    "expand_matrix",
    "false_part",
    "local_resolver",
    "simulate",
    "worst",
]
