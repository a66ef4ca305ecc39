"""Which jobs of a workflow would run for an event, with which result, and why. Nothing is executed.

miles-ci simulate-workflow --event pull_request
miles-ci simulate-workflow --workflow pr-test.yml --event pull_request --results stage-a-cpu=failure
miles-ci simulate-workflow --workflow nightly.yml --event schedule --results cuda/stage-a-cpu=failure
miles-ci simulate-workflow --event pull_request --labels run-ci-kernels --results docker-build=failure --format json

Counts of a stage come from the real plan of this checkout; --count stage=N overrides them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from miles_ci.errors import ExitCode, UsageError, suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workflow", default="", help="file name (default: the test workflow that the event starts)")
    parser.add_argument(
        "--event",
        required=True,
        help="pull_request, pull_request_target, merge_group, schedule, push, workflow_dispatch, …",
    )
    parser.add_argument("--payload", type=Path, help="JSON file with the event's payload")
    parser.add_argument(
        "--input", action="append", default=[], metavar="NAME=VALUE", help="workflow input (repeatable)"
    )
    parser.add_argument("--labels", default="", help="labels of the pull request, separated by spaces")
    parser.add_argument(
        "--results", nargs="*", default=[], metavar="JOB=RESULT", help="how jobs end if they run (default success)"
    )
    parser.add_argument(
        "--count", action="append", default=[], metavar="SUITE=N", help="planned tests of a suite (repeatable)"
    )
    parser.add_argument("--image-needed", action="store_true", help="the image must be built first")
    parser.add_argument("--cancelled", action="store_true", help="the run is cancelled")
    parser.add_argument("--root", type=Path, default=Path("."), help="repository (default: here)")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _pairs(values: list[str], what: str) -> dict[str, str]:
    pairs = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise UsageError(f"{what} {text!r}: write NAME=VALUE")
        pairs[name] = value
    return pairs


def main(args: argparse.Namespace) -> int:
    from miles_ci.workflows.events import check_starts, default_workflow
    from miles_ci.workflows.model import load_all
    from miles_ci.workflows.simulate import JOB_RESULTS, Event, local_resolver, simulate

    workflows = load_all(args.root)
    name = args.workflow or default_workflow(workflows, args.event)
    if name not in workflows:
        raise UsageError(f"--workflow {name}: no such file{suggestion(name, workflows)}")
    check_starts(workflows, name, args.event)
    given = _pairs(args.results, "--results")
    for job, result in given.items():
        if result not in JOB_RESULTS:
            raise UsageError(f"--results {job}={result}: a result is {', '.join(JOB_RESULTS)}")
    outcomes = _outcomes(args, workflows, name, given)
    unknown = sorted(
        job for job in given if job.split("/")[-1] not in {job for wf in workflows.values() for job in wf.jobs}
    )
    if unknown:
        raise UsageError(f"--results: no job {unknown[0]!r}{suggestion(unknown[0], workflows[name].jobs)}")
    inputs = _pairs(args.input, "--input")
    known_inputs = _inputs_of(workflows[name])
    for key in inputs:
        if key not in known_inputs:
            raise UsageError(f"--input {key}: {name} has no such input{suggestion(key, known_inputs)}")
    event = Event(args.event, _payload(args.payload), inputs, cancelled=args.cancelled)
    resolve = local_resolver(workflows)
    outcomes = _with_required_checks(
        simulate(workflows[name], event, outcomes, resolve=resolve), outcomes, args.cancelled
    )
    states = simulate(workflows[name], event, outcomes, resolve=resolve)
    if args.format == "json":
        print(json.dumps(_as_json(states), indent=2))
    else:
        for line in _lines(states):
            print(line)
    return ExitCode.OK


def _payload(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {"pull_request": {"number": 1}}
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"--payload {path}: not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise UsageError(f"--payload {path}: must hold a JSON object, the event's payload")
    return payload


def _inputs_of(workflow: Any) -> set[str]:
    triggers = (workflow.on.get(trigger) or {} for trigger in ("workflow_dispatch", "workflow_call"))
    return {str(name) for trigger in triggers for name in trigger.get("inputs") or {}}


def _counts(values: list[str], suites: Collection[str]) -> dict[str, str]:
    counts = _pairs(values, "--count")
    for suite, text in counts.items():
        if suite not in suites:
            raise UsageError(f"--count {suite}: no such suite{suggestion(suite, suites)}")
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"--count {suite}={text}: the number of planned tests, 0 or more")
    return counts


def _warn_of_labels(fleet: Any, labels: list[str]) -> None:
    from miles_ci.select.policy import Policy

    for warning in Policy.resolve(fleet, "regular", labels, typed=True).warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _outcomes(args: argparse.Namespace, workflows: Any, name: str, given: dict[str, str]) -> dict[str, Any]:
    """Outputs of plan, resolve-deps and authorise for every test workflow that is run or called."""
    from miles_ci.bot import planning
    from miles_ci.registry import load_fleet
    from miles_ci.registry.hosted import self_hosted_suites
    from miles_ci.workflows.simulate import Outcome

    fleet = load_fleet(args.root / "registry.yaml", shown_as="registry.yaml")
    labels = {"pull_request": {"labels": [{"name": label} for label in args.labels.split()]}}
    counts = _counts(args.count, fleet.suites)
    _warn_of_labels(fleet, args.labels.split())
    outcomes: dict[str, Any] = {}
    places = [("", name)] + [
        (f"{job.id}/", str(job.uses).rsplit("/", 1)[-1]) for job in workflows[name].jobs.values() if job.uses
    ]  # fmt: skip
    for prefix, file in places:
        if file not in ("pr-test.yml", "pr-test-rocm.yml"):
            continue
        suites = [job for job in workflows[file].jobs if job in fleet.suites]
        cadence = name.removesuffix(".yml") if prefix else "regular"
        plan, _, _ = planning.make_plan(
            event=labels, cadence=cadence, root=args.root, registry=args.root / "registry.yaml", suites=suites
        )
        outputs = planning.outputs(plan, suites)
        for suite, text in counts.items():
            if suite in suites:
                outputs[f"count-{suite}"] = text
                if text != "0":
                    outputs[f"matrix-{suite}"] = '{"include":[{"shard":1,"shards":1,"runs_on":["x"]}]}'
        gpu = sum(int(outputs[f"count-{suite}"]) for suite in suites if fleet.suites[suite].backend != "cpu")
        own = sum(int(outputs[f"count-{suite}"]) for suite in suites if suite in self_hosted_suites(fleet))
        totals = {"count-gpu": str(gpu), "count-self-hosted": str(own)}
        outcomes[f"{prefix}plan"] = Outcome("success", outputs | totals)
        outcomes[f"{prefix}resolve-deps"] = Outcome(
            "success", {"image_build": "true" if args.image_needed else "false"}
        )
    for job, result in given.items():
        before = outcomes.get(job)
        outcomes[job] = Outcome(result, before.outputs if before and result == "success" else {})
    return outcomes


def _with_required_checks(states: Any, outcomes: dict[str, Any], cancelled: bool, prefix: str = "") -> dict[str, Any]:
    """Add what each required check would say of these results (unless its result was given)."""
    from miles_ci.bot.required_check import judge
    from miles_ci.workflows.simulate import Outcome

    out = dict(outcomes)
    for name, state in states.items():
        if state.inner:
            out |= _with_required_checks(state.inner, outcomes, cancelled, f"{prefix}{name}/")
    if "required-check" in states and f"{prefix}required-check" not in outcomes:
        plan = states["plan"]
        counts = {
            key.removeprefix("count-"): int(value)
            for key, value in plan.outputs.items()
            if key.startswith("count-") and value
        }
        for total in ("gpu", "self-hosted"):
            counts.pop(total, None)
        needs = {name: state.result for name, state in states.items() if name != "required-check"}
        verdict = judge(needs=needs, counts=counts if plan.result == "success" else None, cancelled=cancelled)
        out[f"{prefix}required-check"] = Outcome("success" if verdict.ok else "failure")
    return out


def _lines(states: Any, indent: str = "") -> list[str]:
    width = max((len(name) for name in states), default=0)
    out = []
    for name, state in states.items():
        out.append(f"{indent}{name:<{width}}  {state.result:<9}  {state.reason}")
        if state.inner and len(state.inner) > 1:
            out += _lines(state.inner, indent + "    ")
    return out


def _as_json(states: Any) -> dict[str, Any]:
    return {
        name: {"result": state.result, "reason": state.reason, "legs": list(state.legs), "inner": _as_json(state.inner)}
        for name, state in states.items()
    }
