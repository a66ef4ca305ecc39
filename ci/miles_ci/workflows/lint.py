"""Our own rules on the parsed workflow files; the simulator's proof is in `walk`, official tools in `tools`.

Each rule is a generator over one job (or file) and yields (job id, code, message). All findings of all files
come back in one list, with the line of the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miles_ci.errors import Diagnostic
from miles_ci.workflows.expr import context_paths
from miles_ci.workflows.expr.evaluate import expressions_in
from miles_ci.workflows.expr.syntax import Compare, Index, Literal, walk
from miles_ci.workflows.model import Job, Workflow, WorkflowError, all_strings
from miles_ci.workflows.parts import LOCK, PRELUDE, action
from miles_ci.workflows.simulate import check_permissions, local_resolver

Finding = tuple[str, str, str]
MAX_MINUTES = 15
# docker-build: decision 0701. The _run files get the suite's own limit from their caller.
LONG_JOBS = {("docker-build.yml", "build")}
# The only places that may check out a fork's commit under pull_request_target, each with read access alone.
UNSAFE_CHECKOUTS = {("_run-ci-rocm.yml", "run"), ("pr-test-rocm.yml", "plan")}
_PR_REF = re.compile(r"head\.sha|head_ref|head\.ref|inputs\.(ref|head_sha)|outputs\.sha|refs/pull")


def _name(workflow: Workflow) -> str:
    return workflow.path.rsplit("/", 1)[-1]


def file_rules(workflow: Workflow) -> Iterator[Finding]:
    top = workflow.raw.get("permissions")
    if top not in ({}, {"contents": "read"}):
        yield "", "top-permissions", f"top-level permissions are {top!r}: use {{}} or contents: read"
    concurrency = workflow.concurrency
    group = str(concurrency.get("group", ""))
    if group and group.startswith("${{"):
        yield (
            "",
            "group-prefix",
            f"concurrency group {group!r} has no literal prefix: names of different files would collide",
        )
    if "github.workflow" in group:
        yield "", "group-prefix", "github.workflow is the caller's name in a called workflow: write a literal prefix"
    if concurrency.get("queue") == "max" and concurrency.get("cancel-in-progress") not in (None, False):
        yield "", "queue-cancel", "queue: max with cancel-in-progress is refused by GitHub"
    if _name(workflow).startswith("_run-") and len(workflow.jobs) != 1:
        yield "", "one-job", f"a reusable test workflow holds one job, not {len(workflow.jobs)}"
    for place, text in all_strings(workflow.raw):
        if "refs/pull/" in text and "/merge" in text:
            yield "", "merge-ref", f"{place}: a merge ref moves under our feet; use the exact SHA"


def job_rules(workflow: Workflow, job: Job) -> Iterator[Finding]:
    raw = job.raw
    if "permissions" not in raw:
        yield job.id, "job-permissions", "state `permissions` on every job"
    if raw.get("continue-on-error"):
        yield job.id, "continue-on-error", "an unstable test is the runner's business, not the job's"
    if raw.get("secrets") == "inherit":
        yield job.id, "secrets-inherit", "pass secrets by name"
    if job.needs and not job.states_status:
        yield (
            job.id,
            "status-function",
            "a job with `needs` states a status function, else a skipped need skips it silently",
        )
    matrix = job.strategy.get("matrix")
    if matrix is not None and not isinstance(matrix, str):
        yield job.id, "matrix-literal", "shards come from the plan (fromJSON), never from a literal list"
    yield from _conditions(job)
    if job.uses:
        if not job.uses.startswith("$/.github/workflows/"):
            yield job.id, "call-form", f"call our own files as $/.github/workflows/NAME, not {job.uses}"
        return
    minutes = raw.get("timeout-minutes")
    if minutes is None:
        yield job.id, "timeout", "state timeout-minutes"
    elif isinstance(minutes, str):
        if minutes != "${{ inputs.timeout_minutes }}":
            yield job.id, "timeout", f"timeout-minutes {minutes!r} is neither a number nor the caller's limit"
    elif minutes > MAX_MINUTES and (_name(workflow), job.id) not in LONG_JOBS:
        yield job.id, "timeout", f"timeout-minutes {minutes} is more than {MAX_MINUTES}"
    if job.id == "required-check":
        missing = sorted(set(workflow.jobs) - {job.id} - set(job.needs))
        if missing:
            yield job.id, "required-check-needs", f"required-check cannot see {', '.join(missing)}: add to needs"


def _conditions(job: Job) -> Iterator[Finding]:
    tree = job.tree()
    for part in walk(tree) if tree else ():
        if isinstance(part, Compare) and Literal("failure") in (part.left, part.right):
            sides = [side for side in (part.left, part.right) if isinstance(side, Index)]
            if any(path[0] == "needs" for side in sides for path in context_paths(side)):
                yield (
                    job.id,
                    "tests-failure",
                    "test `== 'success'` or a bypass: `== 'failure'` misses cancelled and skipped",
                )


def step_rules(workflow: Workflow, job: Job) -> Iterator[Finding]:
    for at, step in enumerate(job.steps):
        where = f"step {at + 1} ({step.get('name', step.get('uses', 'run'))})"
        uses = str(step.get("uses", ""))
        if uses:
            yield from _action(job, where, uses)
        if uses.startswith("actions/checkout@"):
            yield from _checkout(workflow, job, where, step.get("with") or {})
        if "run" in step:
            script = str(step["run"])
            if step.get("shell") != "bash" or not script.startswith(PRELUDE):
                yield job.id, "shell", f"{where}: state shell: bash and begin with {PRELUDE.strip()}"
            if "${{" in script:
                yield (
                    job.id,
                    "expression-in-run",
                    f"{where}: pass values through env; an expression in a script is code",
                )
        if step.get("continue-on-error"):
            yield job.id, "continue-on-error", f"{where}: a failed step must fail the job"


def _action(job: Job, where: str, uses: str) -> Iterator[Finding]:
    name, _, sha = uses.partition("@")
    if not re.fullmatch(r"[0-9a-f]{40}", sha):
        yield job.id, "pin", f"{where}: {uses} is not pinned to a commit"
        return
    try:
        if action(name) != uses:
            yield job.id, "pin", f"{where}: {uses} differs from {LOCK.name}"
    except WorkflowError as error:
        yield job.id, "pin", f"{where}: {error}"


def _checkout(workflow: Workflow, job: Job, where: str, given: Mapping[str, Any]) -> Iterator[Finding]:
    if given.get("persist-credentials") is not False:
        yield job.id, "persist-credentials", f"{where}: state persist-credentials: false"
    here = (_name(workflow), job.id)
    if given.get("allow-unsafe-pr-checkout") and here not in UNSAFE_CHECKOUTS:
        yield job.id, "unsafe-checkout", f"{where}: allow-unsafe-pr-checkout is reserved for {sorted(UNSAFE_CHECKOUTS)}"
    if is_privileged(workflow, job) and _PR_REF.search(str(given.get("ref", ""))):
        yield (
            job.id,
            "privileged-checkout",
            f"{where}: a job with write access or secrets checks out the default branch only",
        )


def is_privileged(workflow: Workflow, job: Job) -> bool:
    """Write access to anything but the image registry of a trusted branch, or a secret of ours."""
    writes = [
        scope for scope, level in (workflow.permissions(job) or {}).items() if level == "write" and scope != "packages"
    ]
    secret = any(
        "secrets." in expression for _, text in all_strings(dict(job.raw)) for expression in expressions_in(text)
    )
    return bool(writes) or secret


def container_rules(workflow: Workflow, job: Job) -> Iterator[Finding]:
    container = job.container
    if not container:
        return
    if "--privileged" in str(container.get("options", "")):
        yield job.id, "privileged-container", "name the devices instead of --privileged"
    for volume in container.get("volumes") or []:
        if ":/models" in volume and not volume.endswith(":ro"):
            yield job.id, "model-cache", f"{volume}: the model cache is mounted read-only"
    names = [str(step.get("name", "")) for step in job.steps]
    if not (
        names
        and names[0].startswith("Clean")
        and names[-1].startswith("Clean")
        and job.steps[-1].get("if") == "always()"
    ):
        yield job.id, "workspace", "clean the workspace first and, always(), last"
    ids = [step.get("id", "") for step in job.steps]
    order = [f"dependencies-{verb}" for verb in ("checkout", "check", "apply", "install")]
    if [step_id for step_id in ids if step_id.startswith("dependencies-")] != order:
        yield job.id, "dependency-order", f"steps must be in the order {' < '.join(order)}"


def call_rules(workflows: Mapping[str, Workflow], workflow: Workflow, job: Job) -> Iterator[Finding]:
    if not job.uses:
        return
    try:
        called = local_resolver(workflows)(job.uses)
        check_permissions(workflow, job, called)
    except WorkflowError as error:
        yield job.id, "call", str(error)
        return
    given, declared = set(job.raw.get("with") or {}), called.call_inputs()
    for name in sorted(given - set(declared)):
        yield job.id, "call-input", f"{job.uses} has no input {name!r}"
    for name, spec in declared.items():
        if spec.get("required") and name not in given:
            yield job.id, "call-input", f"{job.uses} requires input {name!r}"


RULES: tuple[Callable[[Workflow, Job], Iterator[Finding]], ...] = (job_rules, step_rules, container_rules)


def lint(workflows: Mapping[str, Workflow], texts: Mapping[str, str] | None = None) -> list[Diagnostic]:
    """All findings of our own rules, sorted. `texts` (file name -> text) gives line numbers."""
    found: list[Diagnostic] = []
    for name, workflow in workflows.items():
        text = (texts or {}).get(name, "")
        findings = list(file_rules(workflow))
        for job in workflow.jobs.values():
            for rule in RULES:
                findings += rule(workflow, job)
            findings += call_rules(workflows, workflow, job)
        for job_id, code, message in findings:
            path = f".github/workflows/{name}"
            found.append(
                Diagnostic(path, _line(text, job_id), 1, code, f"job {job_id}: {message}" if job_id else message)
            )
    return sorted(found)


def _line(text: str, job_id: str) -> int:
    for at, line in enumerate(text.splitlines(), 1):
        if job_id and line.startswith(f"  {job_id}:"):
            return at
    return 1
