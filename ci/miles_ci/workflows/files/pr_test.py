"""`pr-test.yml` (CPU and CUDA) and `pr-test-rocm.yml`: plan once, run stage after stage, prove that nothing was left out.

The row is written once (`needs_condition`) and used by every job of the chain that serves a stage, so no job in
between can re-impose fast-fail. Counts, shards and runner labels come from the plan at run time: switching a
pool off changes no file.
"""

from __future__ import annotations

import json
from typing import Any

from miles_ci.errors import UsageError
from miles_ci.registry import Fleet
from miles_ci.registry.hosted import self_hosted_suites
from miles_ci.workflows.parts import (
    EXTRA_MINUTES,
    both,
    call,
    checkout,
    download,
    either,
    install_ci,
    job,
    output,
    outputs_of,
    run,
    setup_python,
    succeeded,
    trusted_tools,
    upload,
)

READ = {"contents": "read"}
# Fork, branch and merge-queue events carry the commit in different places.
REF = "${{ inputs.ref || github.event.pull_request.head.sha || github.sha }}"
# What the guard allowed, and nothing else, is checked out on machines of ours.
AUTHORISED = "${{ needs.authorise.outputs.sha }}"
DEPS_ENV = {"DIRECTIVES": "${{ needs.authorise.outputs.directives }}", "IMAGE_TAG": "${{ inputs.image_tag }}"}
ALIVE = "!cancelled()"
CALL_INPUTS: dict[str, Any] = {
    "cadence": {"description": "regular, nightly, weekly or release", "type": "string", "required": True},
    "image_tag": {
        "description": "Image tag to test, empty for the default",
        "type": "string",
        "required": False,
        "default": "",
    },
    "ref": {"description": "Commit to test, 40 hex digits", "type": "string", "required": True},
}
DEPS = ("dependency_commits", "image_build", "image_key", "image_reference")


def suites_of(fleet: Fleet, *backends: str) -> list[str]:
    return [name for name, suite in fleet.suites.items() if suite.backend in backends]


def first_cpu_suite(fleet: Fleet, suite: str) -> str | None:
    """The CPU suite that a suite finally waits for: what the image chain may wait for."""
    first = fleet.suites[suite].needs
    while first is not None and fleet.suites[first].backend != "cpu":
        first = fleet.suites[first].needs
    return first


def needs_condition(needed: str | None) -> str:
    """One row of the table of needed suites as a condition: bypass, or passed, or nothing to run."""
    if needed is None:
        return "true"
    nothing = both(f"needs.{needed}.result == 'skipped'", f"{output('plan', f'count-{needed}')} == '0'")
    return either(f"{output('plan', 'bypass')} == 'true'", succeeded(needed), f"({nothing})")


def _plan_job(fleet: Fleet, suites: list[str], *, needs: tuple[str, ...] = (), ref: str, rocm: bool) -> dict[str, Any]:
    counts = [f"{kind}-{suite}" for suite in suites for kind in ("count", "matrix")]
    env = {
        "CADENCE": "${{ inputs.cadence || 'regular' }}",
        "ROOT": "pr-source" if rocm else ".",
        "SUITES": " ".join(suites),
    }
    script = 'python -m miles_ci bot plan --cadence "$CADENCE" --root "$ROOT" --suites "$SUITES" --output plan.json'
    steps = [
        checkout(name="Check out the harness", depth=0) if rocm else checkout(ref=ref, depth=0),
        setup_python(),
        install_ci(),
    ]
    if rocm:
        # Read as data (declarations by AST); nothing of it is imported or installed here.
        steps.insert(
            1, checkout(name="Check out the tested commit as data", ref=ref, path="pr-source", unsafe_pr=True, depth=0)
        )
    steps += [
        run("Plan", script, env=env, step_id="plan"),
        upload("plan-rocm" if rocm else "plan", "plan.json", when=None),
    ]
    return job(
        steps=steps,
        permissions=READ,
        minutes=10,
        needs=needs,
        condition=both(ALIVE, *[succeeded(n) for n in needs]) if needs else None,
        outputs=outputs_of("plan", ["bypass", "cadence", "count-gpu", "count-self-hosted", "digest", *counts]),
    )


def _deps_job(base: str, needs: list[str], image: str, env: dict[str, str], ref: str) -> dict[str, Any]:
    script = 'python -m miles_ci bot resolve-deps --image "$IMAGE" --image-tag "$IMAGE_TAG"'
    steps = [checkout(ref=ref) if ref else checkout(name="Check out the harness"), setup_python(), install_ci()]
    steps.append(
        run(
            "Resolve directives and the image key",
            script,
            env=env
            | {"CADENCE": "${{ inputs.cadence || 'regular' }}", "GITHUB_TOKEN": "${{ github.token }}", "IMAGE": image},
            step_id="deps",
        )
    )
    permissions = READ | {"packages": "read", "pull-requests": "read"}
    return job(steps=steps, permissions=permissions, needs=needs, condition=base, outputs=outputs_of("deps", DEPS))


def _authorise_job(
    *, ref: str, number: str, needs: tuple[str, ...] = (), condition: str | None = None
) -> dict[str, Any]:
    """The one guard before machines of ours: default-branch code decides about one exact commit."""
    question = run(
        "Is this exact commit allowed to run?",
        "python -m miles_ci bot authorise",
        env={
            "APP_ID": "${{ vars.MILES_CI_APP_ID }}",
            "CADENCE": "${{ inputs.cadence }}",
            "GITHUB_TOKEN": "${{ github.token }}",
            "PULL_NUMBER": number,
            "REF": ref,
        },
        step_id="authorise",
    )
    return job(
        steps=[*trusted_tools(), question],
        permissions={"checks": "read", "contents": "read", "pull-requests": "read"},
        needs=needs,
        condition=condition,
        outputs=outputs_of("authorise", ["directives", "sha"]),
    )


def _image_jobs(
    base: str, before: list[str], image: str, env: dict[str, str], ref: str, *, build: bool
) -> dict[str, Any]:
    """resolve-deps, docker-build, resolve-image; `base` holds the row of the stages they serve."""
    wanted = f"{output('resolve-deps', 'image_build')} == 'true'"
    jobs: dict[str, Any] = {"resolve-deps": _deps_job(base, before, image, env, ref)}
    ready = "true"
    needs = [*before, "resolve-deps"]
    if build:
        jobs["docker-build"] = call(
            "docker-build.yml",
            permissions=READ | {"packages": "write"},
            given={"image": image, "key": "${{ needs.resolve-deps.outputs.image_key }}", "ref": ref},
            needs=needs,
            condition=both(base, succeeded("resolve-deps"), wanted),
        )
        idle = both("needs.docker-build.result == 'skipped'", f"{output('resolve-deps', 'image_build')} != 'true'")
        ready = either(succeeded("docker-build"), f"({idle})")
        needs = [*needs, "docker-build"]
    script = 'python -m miles_ci bot resolve-image --reference "$IMAGE_REFERENCE"'
    env = {
        "GITHUB_TOKEN": "${{ github.token }}",
        "IMAGE_REFERENCE": "${{ needs.resolve-deps.outputs.image_reference }}",
    }
    jobs["resolve-image"] = job(
        steps=[
            checkout(name="Check out the harness", ref=ref or None),
            setup_python(),
            install_ci(),
            run("Turn the tag into a digest", script, env=env, step_id="image"),
        ],
        permissions=READ | {"packages": "read"},
        needs=needs,
        condition=both(base, succeeded("resolve-deps"), ready),
        outputs=outputs_of("image", ["image"]),
    )
    return jobs


def _stage(fleet: Fleet, suite: str, *, ref: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    spec = fleet.suites[suite]
    needed = spec.needs
    gpu = spec.backend != "cpu"
    chain = [*before, "plan", *(["resolve-deps", "resolve-image"] if gpu else [])]
    needs = [*chain, *([needed] if needed else [])]
    wanted = f"{output('plan', f'count-{suite}')} != '0'"
    condition = both(ALIVE, *map(succeeded, chain), wanted, needs_condition(needed))
    given: dict[str, Any] = {
        "artifact": f"{suite}-${{{{ matrix.shard }}}}",
        "plan_digest": "${{ needs.plan.outputs.digest }}",
        "ref": ref,
        "shard": "${{ matrix.shard }}/${{ matrix.shards }}",
        "suite": suite,
        "timeout_minutes": -(-spec.timeout_s // 60) + EXTRA_MINUTES,
    }
    if not gpu:
        given["runs_on"] = json.dumps(spec.runs_on)
    else:
        given |= {
            "image": "${{ needs.resolve-image.outputs.image }}",
            **({"plan": "plan-rocm"} if spec.backend == "rocm" else {}),
            "dependency_commits": "${{ needs.resolve-deps.outputs.dependency_commits }}",
            "runs_on": "${{ toJSON(matrix.runs_on) }}",
        }
    return call(
        {"cpu": "_run-cpu-ci.yml", "cuda": "_run-ci.yml", "rocm": "_run-ci-rocm.yml"}[spec.backend],
        permissions=READ,
        given=dict(sorted(given.items())),
        needs=needs,
        condition=condition,
        matrix=f"${{{{ fromJSON(needs.plan.outputs.matrix-{suite}) }}}}",
        # The cards read suite and shard back from this name.
        name=f"{suite} (${{{{ matrix.shard }}}}/${{{{ matrix.shards }}}})",
    )


def _required_check_job(needs: list[str], suites: list[str], *, ref: str | None, lane: str = "") -> dict[str, Any]:
    """`ref` None: the default branch's harness judges (privileged workflow)."""
    script = 'python -m miles_ci bot required-check --suites "$SUITES" --plan plan --results results --output merged'
    env = {
        "CANCELLED": "${{ steps.cancelled.outputs.value }}",
        "NEEDS": "${{ toJSON(needs) }}",
        "SUITES": " ".join(suites),
    }
    steps = [
        run("Note a cancelled run", 'echo "value=true" >> "$GITHUB_OUTPUT"', when="cancelled()", step_id="cancelled"),
        checkout(name="Check out the harness", ref=ref),
        setup_python(),
        install_ci(),
        # By pattern: an absent plan is the check's verdict to give, not a failed download.
        download(pattern=f"plan{lane}", path="plan"),
        download(pattern="results-*", path="results"),
        run("Judge", script, env=env, step_id="needs"),
        upload(f"merged{lane}", "merged", missing="warn"),
    ]
    steps = [step if "if" in step else {"name": step["name"], "if": "always()", **step} for step in steps]
    return job(steps=steps, permissions=READ, needs=needs, condition="always()", minutes=15)


def _concurrency(prefix: str, event: str) -> dict[str, Any]:
    number = (
        "github.event.pull_request.number || inputs.pull_number"
        if event == "pull_request_target"
        else "github.event.pull_request.number"
    )
    group = f"{prefix}-${{{{ {number} || (inputs.cadence && format('{{0}}-{{1}}', inputs.ref, inputs.cadence)) || github.run_id }}}}"
    return {"group": group, "cancel-in-progress": f"${{{{ github.event_name == '{event}' }}}}"}


def pr_test(fleet: Fleet) -> dict[str, Any]:
    cpu, cuda = suites_of(fleet, "cpu"), suites_of(fleet, "cuda")
    roots = sorted({first_cpu_suite(fleet, suite) for suite in cuda}, key=str)
    needed = [root for root in roots if root is not None]
    jobs: dict[str, Any] = {"plan": _plan_job(fleet, [*cpu, *cuda], ref=REF, rocm=False)}
    own = self_hosted_suites(fleet)
    guard = {suite: ("authorise",) if suite in own else () for suite in (*cpu, *cuda)}
    if any(guard.values()):
        wanted = f"{output('plan', 'count-self-hosted')} != '0'"
        jobs["authorise"] = _authorise_job(
            ref=REF,
            number="${{ github.event.pull_request.number }}",
            needs=("plan",),
            condition=both(ALIVE, succeeded("plan"), wanted),
        )
    jobs |= {suite: _stage(fleet, suite, ref=AUTHORISED if guard[suite] else REF, before=guard[suite]) for suite in cpu}
    if cuda:
        ready = both(ALIVE, succeeded("plan"), succeeded("authorise"))
        base = both(ready, f"{output('plan', 'count-gpu')} != '0'", either(*map(needs_condition, roots)))
        before = ["plan", "authorise", *needed]
        jobs |= _image_jobs(base, before, default_image(fleet, "cuda"), DEPS_ENV, AUTHORISED, build=True)
        jobs |= {suite: _stage(fleet, suite, ref=AUTHORISED, before=guard[suite]) for suite in cuda}
    jobs["required-check"] = _required_check_job(list(jobs), [*cpu, *cuda], ref=REF)
    return {
        "name": "PR Test",
        "on": {
            "pull_request": {"types": ["opened", "synchronize", "reopened", "labeled"]},
            "merge_group": {"types": ["checks_requested"]},
            "workflow_dispatch": {
                "inputs": {
                    "image_tag": {
                        "description": "Image tag to test, empty for the default",
                        "type": "string",
                        "required": False,
                        "default": "",
                    },
                    "labels": {
                        "description": "run-ci labels, separated by spaces",
                        "type": "string",
                        "required": False,
                        "default": "",
                    },
                }
            },
            "workflow_call": {"inputs": CALL_INPUTS},
        },
        "permissions": READ,
        "concurrency": _concurrency("pr-test", "pull_request"),
        "jobs": jobs,
    }


def default_image(fleet: Fleet, backend: str) -> str:
    """The image of a backend: the first entry of `images` whose name begins with it."""
    for name in fleet.images:
        if name.startswith(backend):
            return name
    raise UsageError(f"registry.yaml: images has no entry for {backend}: add one whose name begins with '{backend}'")


def pr_test_rocm(fleet: Fleet) -> dict[str, Any]:
    rocm = suites_of(fleet, "rocm")
    ref = AUTHORISED
    jobs: dict[str, Any] = {
        "authorise": _authorise_job(
            ref="${{ inputs.ref || inputs.head_sha || github.event.pull_request.head.sha || github.sha }}",
            number="${{ github.event.pull_request.number || inputs.pull_number }}",
        ),
        "plan": _plan_job(fleet, rocm, needs=("authorise",), ref=ref, rocm=True),
    }
    base = both(ALIVE, succeeded("authorise"), succeeded("plan"), f"{output('plan', 'count-gpu')} != '0'")
    jobs |= _image_jobs(base, ["authorise", "plan"], default_image(fleet, "rocm"), DEPS_ENV, "", build=False)
    jobs |= {suite: _stage(fleet, suite, ref=ref, before=("authorise",)) for suite in rocm}
    jobs["required-check"] = _required_check_job(list(jobs), rocm, ref=None, lane="-rocm")
    return {
        "name": "PR Test (ROCm)",
        # The commit in the name is how a dispatched run is found again; the request id proves the dispatch.
        "run-name": "ROCm ${{ inputs.head_sha || github.event.pull_request.head.sha || github.sha }} [${{ inputs.request_id }}]",
        "on": {
            "pull_request_target": {"types": ["opened", "synchronize", "reopened", "labeled"]},
            "workflow_dispatch": {
                "inputs": {
                    "head_sha": {"description": "Approved commit, 40 hex digits", "type": "string", "required": True},
                    "pull_number": {"description": "Pull request", "type": "string", "required": True},
                    "request_id": {"description": "32 hex digits", "type": "string", "required": True},
                }
            },
            "workflow_call": {"inputs": CALL_INPUTS},
        },
        "permissions": READ,
        "concurrency": _concurrency("pr-test-rocm", "pull_request_target"),
        "jobs": jobs,
    }


def documents(fleet: Fleet) -> dict[str, dict[str, Any]]:
    found = {"pr-test.yml": pr_test(fleet)}
    if suites_of(fleet, "rocm"):
        found["pr-test-rocm.yml"] = pr_test_rocm(fleet)
    return found
