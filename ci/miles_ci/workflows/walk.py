"""Proof by enumeration: every job of every file against its rule, over all results, cadences and flags.

For each job the walker tries every result of the jobs its rule or its condition reads (what neither reads cannot
change the answer, so the reduction is exact), times cadence, bypass label, selected counts, image needed, and a
cancelled run. A second pass walks whole runs forward, so that a job in between cannot re-impose fast-fail. The
smallest counterexample of each job is returned, printed in words.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miles_ci.registry import Fleet
from miles_ci.registry.hosted import self_hosted_suites
from miles_ci.workflows.expr import Env, context_paths, is_truthy, status_functions
from miles_ci.workflows.expr.values import normalise
from miles_ci.workflows.model import Job, Workflow
from miles_ci.workflows.rules import Rule, State, rules_for
from miles_ci.workflows.simulate import JOB_RESULTS, Event, Outcome, false_part, local_resolver, simulate

CADENCES = ("regular", "nightly", "weekly", "release")


@dataclass(frozen=True)
class Violation:
    """A state in which a job does what its rule forbids; `weight` counts what differs from a quiet run."""

    file: str
    job: str
    must_run: bool
    why: str
    differences: tuple[tuple[str, str], ...]
    condition: str
    because: str = ""

    @property
    def weight(self) -> int:
        return len(self.differences)

    def text(self) -> str:
        verbs = ("must RUN but is SKIPPED", "must be SKIPPED but RUNS")
        lines = [f"{self.file}: job {self.job} {verbs[0] if self.must_run else verbs[1]} when"]
        lines += [f"    {name:<28} {value}" for name, value in self.differences]
        lines += ["    everything else              quiet: regular, success, selected, not cancelled"]
        lines.append(f"  rule: {self.why}")
        return "\n".join(
            [*lines, f"  because it is false that {self.because}" if self.because else f"  if:   {self.condition}"]
        )


def job_outputs(job_id: str, state: State, fleet: Fleet) -> dict[str, str]:
    """What a job publishes in a state (the same names as the bots write); the same dict for the same state."""
    if job_id == "plan":
        gpu = frozenset(name for name, suite in fleet.suites.items() if suite.backend != "cpu")
        own = frozenset(self_hosted_suites(fleet))
        return _plan_outputs(tuple(state.counts.items()), state.bypass(fleet), gpu, own)
    if job_id == "resolve-deps":
        return {"image_build": "true" if state.image_needed else "false"}
    if job_id == "resolve":
        legs = {f"matrix_{name}": '{"include":[{"suite":"s"}]}' for name in state.counts}
        return {f"count_{name}": str(count) for name, count in state.counts.items()} | legs
    return {}


@functools.lru_cache(maxsize=1024)
def _plan_outputs(
    counts: tuple[tuple[str, int], ...], bypass: bool, gpu: frozenset[str], self_hosted: frozenset[str]
) -> dict[str, str]:
    total = sum(count for suite, count in counts if suite in gpu)
    own = sum(count for suite, count in counts if suite in self_hosted)
    legs = {f"matrix-{suite}": '{"include":[{"shard":1,"shards":1,"runs_on":["x"]}]}' for suite, _ in counts}
    numbers = {f"count-{suite}": str(count) for suite, count in counts}
    flags = {"bypass": "true" if bypass else "false", "count-gpu": str(total), "count-self-hosted": str(own)}
    return flags | numbers | legs


def _differences(state: State, rule: Rule) -> tuple[tuple[str, str], ...]:
    out = [(f"needs.{name}.result", result) for name, result in state.results.items() if result != "success"]
    out += [(f"selected in {name}", "0") for name, count in state.counts.items() if count == 0]
    if state.cadence != "regular":
        out.append(("cadence", state.cadence))
    flags = {
        "label bypass-fastfail": state.bypass_label,
        "image must be built": state.image_needed,
        "run cancelled": state.cancelled,
    }
    out += [(name, "yes") for name, value in flags.items() if value]
    if state.event:
        out.append(("event", str(dict(state.event))))
    return tuple(out)


def _read_by(job: Job) -> tuple[set[str], set[str]]:
    """Jobs whose result a condition reads, and its status functions."""
    tree = job.tree()
    if tree is None:
        return set(), {"success"}
    paths = context_paths(tree)
    read = {path[1] for path in paths if path[0] == "needs" and len(path) > 2 and path[2] == "result"}
    if ("needs",) in paths or any(path[0] == "needs" and "*" in path for path in paths):
        read = set(job.needs)
    return read, status_functions(tree) or {"success"}


def states_of(workflow: Workflow, job: Job, rule: Rule) -> Iterator[State]:
    """Every state that can make a difference for a job, quiet ones first."""
    read, status = _read_by(job)
    known = {name.lower(): name for name in workflow.jobs}
    names = set(rule.jobs) | {known.get(name, name) for name in read}
    if status & {"success", "failure"}:
        names |= workflow.closure(job.id)
    names &= set(workflow.jobs)
    ordered = sorted(names)
    selections = [
        dict(zip(rule.counts, counts, strict=True)) for counts in itertools.product((1, 0), repeat=len(rule.counts))
    ]
    cadences = CADENCES if rule.cadences else ("regular",)
    flag = (False, True)
    for results in itertools.product(JOB_RESULTS, repeat=len(ordered)):
        assigned = dict(zip(ordered, results, strict=True))
        for selected in selections:
            for cadence, bypass, image, cancelled, event in itertools.product(
                cadences, flag if rule.cadences else (False,), flag if rule.image else (False,), flag, rule.events
            ):
                yield State(assigned, selected, cadence, bypass, image, cancelled, event)


def environment(workflow: Workflow, job: Job, state: State, fleet: Fleet) -> Env:
    """What the condition of a job sees in a state (results as given, not derived)."""
    needs = {
        name: {"result": state.results.get(name, "success"), "outputs": job_outputs(name, state, fleet)}
        for name in job.needs
    }
    github = normalise({"event": dict(state.event), "event_name": "x"})
    results = {state.results.get(name, "success") for name in workflow.closure(job.id)}
    functions = {
        "success": lambda: results <= {"success"} and not state.cancelled,
        "failure": lambda: "failure" in results,
        "cancelled": lambda: state.cancelled,
        "always": lambda: True,
    }
    return Env({"needs": needs, "github": github, "inputs": {}, "vars": {}}, functions)


def runs(workflow: Workflow, job: Job, state: State, fleet: Fleet) -> bool:
    """Whether the condition lets the job run in a state."""
    return is_truthy(job.effective_condition(environment(workflow, job, state, fleet)))


def walk_job(
    workflow: Workflow, name: str, job: Job, rule: Rule, fleet: Fleet, *, first: bool = False
) -> tuple[int, Violation | None]:
    """Number of states tried and the smallest violation (with `first`, the first one found)."""
    tried, best = 0, None
    # The workflow sees the cadence only through `bypass`: states that look the same to it are evaluated once.
    seen: dict[tuple[object, ...], bool] = {}
    for state in states_of(workflow, job, rule):
        tried += 1
        must = rule.runs(state)
        key = (
            *state.results.values(),
            *state.counts.values(),
            state.bypass(fleet),
            state.image_needed,
            state.cancelled,
        )
        key = (*key, id(state.event))
        if key not in seen:
            seen[key] = runs(workflow, job, state, fleet)
        if seen[key] != must:
            condition = job.condition or "(none: implicit success())"
            because = (
                false_part(job.condition, environment(workflow, job, state, fleet)) if must and job.condition else ""
            )
            found = Violation(name, job.id, must, rule.why, _differences(state, rule), condition, because)
            if best is None or found.weight < best.weight:
                best = found
            if first:
                break
    return tried, best


@dataclass(frozen=True)
class WalkReport:
    """`tried`: states for each file; `violations`: at most one for each job and pass."""

    tried: Mapping[str, int]
    violations: tuple[Violation, ...]

    def text(self) -> str:
        lines = [f"{name:<24} {count:>8,} states" for name, count in sorted(self.tried.items())]
        lines.append(f"{'total':<24} {sum(self.tried.values()):>8,} states, {len(self.violations)} violations")
        return "\n".join([*lines, *(violation.text() for violation in self.violations)])


def walk(workflows: Mapping[str, Workflow], fleet: Fleet) -> WalkReport:
    """Prove every job of every file, then whole runs of the test workflows and their callers."""
    rules, tried, found = rules_for(fleet), {}, []
    for name, workflow in workflows.items():
        tried[name] = 0
        for job in workflow.jobs.values():
            rule = rules.get(name, {}).get(job.id)
            if rule is None:
                found.append(
                    Violation(
                        name,
                        job.id,
                        False,
                        "every job needs a rule in miles_ci.workflows.rules",
                        (),
                        str(job.condition),
                    )
                )
                continue
            count, violation = walk_job(workflow, name, job, rule, fleet)
            tried[name] += count
            found += [violation] if violation else []
        missing = sorted(set(rules.get(name, {})) - set(workflow.jobs))
        found += [
            Violation(name, job, True, "the registry asks for this job", (), "(the job is absent)") for job in missing
        ]
    for name in ("pr-test.yml", "pr-test-rocm.yml"):
        if name in workflows:
            count, violations = walk_forward(workflows, name, fleet)
            tried[name] += count
            found += violations
    found += walk_callers(workflows, fleet)
    return WalkReport(tried, tuple(found))


def _scenarios(workflow: Workflow, fleet: Fleet) -> Iterator[tuple[State, dict[str, str]]]:
    """Whole runs: needed suite, plan and authorisation end in every way, at most one image job ends badly."""
    suites = [name for name in workflow.jobs if name in fleet.suites]
    firsts = [
        name
        for name in ("authorise", "plan", *suites)
        if name in workflow.jobs and _needs_something(workflow, name, fleet)
    ]
    chain = [name for name in ("resolve-deps", "docker-build", "resolve-image") if name in workflow.jobs]
    troubles = [{}, *({name: bad} for name in chain for bad in ("failure", "cancelled"))]
    for endings in itertools.product(("success", "failure", "cancelled"), repeat=len(firsts)):
        for trouble, cpu, gpu in itertools.product(troubles, (1, 0), (1, 0)):
            counts = {name: cpu if fleet.suites[name].backend == "cpu" else gpu for name in suites}
            results: dict[str, str] = dict(zip(firsts, endings, strict=True)) | trouble
            for cadence, label, image, cancelled in itertools.product(
                CADENCES, (False, True), (False, True), (False, True)
            ):
                yield State({}, counts, cadence, label, image, cancelled), results


def _needs_something(workflow: Workflow, name: str, fleet: Fleet) -> bool:
    return name not in fleet.suites or any(suite.needs == name for suite in fleet.suites.values())


def walk_forward(workflows: Mapping[str, Workflow], name: str, fleet: Fleet) -> tuple[int, list[Violation]]:
    """Simulate whole runs and compare each stage with its rule on the results that really occurred."""
    workflow, rules = workflows[name], rules_for(fleet)[name]
    best: dict[str, Violation] = {}
    simulated: dict[tuple[object, ...], dict[str, str]] = {}
    tried = 0
    for scenario, endings in _scenarios(workflow, fleet):
        tried += 1
        # Runs that look the same to the workflow are simulated once.
        key = (
            *endings.items(),
            *scenario.counts.values(),
            scenario.bypass(fleet),
            scenario.image_needed,
            scenario.cancelled,
        )
        if key not in simulated:
            simulated[key] = _whole_run(workflow, scenario, endings, fleet)
        seen = simulated[key]
        state = State(
            seen, scenario.counts, scenario.cadence, scenario.bypass_label, scenario.image_needed, scenario.cancelled
        )
        for job, rule in rules.items():
            if job not in seen:
                continue
            must = _must_run(job, rule, state, fleet)
            if (seen[job] != "skipped") != must:
                ends = State(
                    endings, scenario.counts, state.cadence, state.bypass_label, state.image_needed, state.cancelled
                )
                violation = Violation(
                    name,
                    job,
                    must,
                    f"whole run: {rule.why}",
                    _differences(ends, rule),
                    workflow.jobs[job].condition or "",
                )
                if job not in best or violation.weight < best[job].weight:
                    best[job] = violation
    return tried, list(best.values())


def _whole_run(workflow: Workflow, scenario: State, endings: Mapping[str, str], fleet: Fleet) -> dict[str, str]:
    outcomes: dict[str, Outcome | str] = {}
    for job in workflow.jobs:
        result = endings.get(job, "success")
        outcomes[job] = Outcome(result, job_outputs(job, scenario, fleet) if result == "success" else {})
    got = simulate(workflow, Event("x", cancelled=scenario.cancelled), outcomes, explain=False)
    return {job: state.result for job, state in got.items()}


def _must_run(job: str, rule: Rule, state: State, fleet: Fleet) -> bool:
    """The rule on a whole run, except that nothing between a stage and what it needs may decide by itself."""
    if job not in fleet.suites or fleet.suites[job].backend == "cpu":
        return rule.runs(state)
    served = {name: "success" for name in ("resolve-deps", "resolve-image") if state.results.get(name) == "skipped"}
    if not served or "failure" in _chain(state) or "cancelled" in _chain(state):
        return rule.runs(state)
    # Nothing in the chain ended badly, yet it was skipped: the stage must then be one that must not run at all.
    return rule.runs(
        State(
            {**state.results, **served},
            state.counts,
            state.cadence,
            state.bypass_label,
            state.image_needed,
            state.cancelled,
        )
    )


def _chain(state: State) -> set[str]:
    return {state.results.get(name, "success") for name in ("resolve-deps", "docker-build", "resolve-image")}


def walk_callers(workflows: Mapping[str, Workflow], fleet: Fleet) -> list[Violation]:
    """nightly, weekly, release: the cadence is a literal of theirs, and a failed CPU stage stops no GPU stage."""
    found: list[Violation] = []
    resolve = local_resolver(workflows)
    for cadence in ("nightly", "weekly", "release"):
        name = f"{cadence}.yml"
        if name not in workflows:
            continue
        callers = list(workflows[name].jobs.values())
        wrong = [job for job in callers if (job.raw.get("with") or {}).get("cadence") != cadence]
        for job in wrong:
            why = f"the cadence is the literal {cadence!r}: a called workflow cannot infer it"
            found.append(Violation(name, job.id, True, why, (), f"with: {job.raw.get('with')}"))
        if wrong:
            continue
        outcomes: dict[str, Outcome | str] = {}
        wanted: dict[str, list[str]] = {}
        for job in callers:
            called = resolve(str(job.uses))
            wanted[job.id] = [suite for suite in called.jobs if suite in fleet.suites]
            state = State({}, dict.fromkeys(wanted[job.id], 1), cadence)
            outcomes |= {
                f"{job.id}/{inner}": Outcome("success", job_outputs(inner, state, fleet)) for inner in called.jobs
            }
            outcomes[f"{job.id}/stage-a-cpu"] = "failure"
        states = simulate(workflows[name], Event("schedule"), outcomes, resolve=resolve)
        for job_id, suites in wanted.items():
            for suite in suites:
                inner = states[job_id].inner[suite]
                if not inner.ran:
                    found.append(
                        Violation(
                            name,
                            f"{job_id}/{suite}",
                            True,
                            "table of needed suites",
                            (("stage-a-cpu", "failure"),),
                            inner.reason,
                        )
                    )
    return found
