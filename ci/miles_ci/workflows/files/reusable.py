"""`_run-cpu-ci.yml`, `_run-ci.yml`, `_run-ci-rocm.yml`: one suite shard (or one file) on one machine.

One job in each file, so that a backend which is not used shows no skipped twin. Inputs reach scripts through
`env`. The CUDA and ROCm jobs run in a container with the devices they need and nothing more.
"""

from __future__ import annotations

from typing import Any

from miles_ci.workflows.parts import (
    HARNESS_PROJECTS,
    PIP,
    Step,
    checkout,
    clean_workspace,
    download,
    install_ci,
    job,
    run,
    setup_python,
    upload,
)

_TEXT = {"type": "string", "required": False, "default": ""}
_COMMON: dict[str, Any] = {
    "artifact": {"description": "Suffix of the result artifact's name", "type": "string", "required": True},
    "file": {"description": "Run this one test file instead of a shard", **_TEXT},
    "node": {"description": "With file: run this one test", **_TEXT},
    "plan": {"description": "Artifact that holds plan.json", "type": "string", "required": False, "default": "plan"},
    "plan_digest": {"description": "Digest of the uploaded plan; required for a shard", **_TEXT},
    "ref": {"description": "Commit to test, 40 hex digits", "type": "string", "required": True},
    "runs_on": {"description": "JSON list of runner labels", "type": "string", "required": True},
    "shard": {"description": "i/n, counted from 1", **_TEXT},
    "suite": {"description": "Suite id of registry.yaml", "type": "string", "required": True},
    "timeout_minutes": {"description": "Limit of the job", "type": "number", "required": True},
}
_GPU: dict[str, Any] = {
    "dependency_commits": {
        "description": "JSON object: commit to install of each dependency that was named; the others are the image's copies",
        **_TEXT,
    },
    "image": {"description": "Container image by digest", "type": "string", "required": True},
}
# Shard or file, decided once, in one place, for every backend.
_SCRIPT = """
if [[ -n "$TEST_FILE" ]]; then
  target=(--file "$TEST_FILE${TEST_NODE:+::$TEST_NODE}")
else
  export MILES_CI_PLAN=plan/plan.json
  target=(--shard "$SHARD")
fi
python -m miles_ci run --suite "$SUITE" "${target[@]}" --results results
"""
_ENV = {
    "MILES_CI_PLAN_DIGEST": "${{ inputs.plan_digest }}",
    "SHARD": "${{ inputs.shard }}",
    "SUITE": "${{ inputs.suite }}",
    "TEST_FILE": "${{ inputs.file }}",
    "TEST_NODE": "${{ inputs.node }}",
}


def _run_suite(env: dict[str, str] | None = None) -> Step:
    return run("Run the suite", _SCRIPT, env=_ENV | (env or {}), step_id="run")


def _plan() -> Step:
    return download(name="${{ inputs.plan }}", path="plan", when="inputs.file == ''")


def _results() -> Step:
    return upload("results-${{ inputs.artifact }}", "results", missing="warn")


def _document(name: str, inputs: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "on": {"workflow_call": {"inputs": dict(sorted(inputs.items()))}},
        "permissions": {},
        "jobs": {"run": body},
    }


def _cpu() -> dict[str, Any]:
    install = f"""
python -m miles_ci.workflows.requirements pyproject.toml {HARNESS_PROJECTS} --extra dev > requirements.txt
{PIP} --requirement requirements.txt
"""
    ours = "runner.environment == 'self-hosted'"
    steps = [
        clean_workspace("Clean the workspace", when=ours),
        checkout(ref="${{ inputs.ref }}"),
        setup_python(),
        _plan(),
        install_ci(),
        run("Install what pyproject.toml names", install),
        _run_suite(),
        _results(),
        clean_workspace("Clean the workspace again", when=f"always() && {ours}"),
    ]
    body = job(
        steps=steps,
        permissions={"contents": "read"},
        minutes="${{ inputs.timeout_minutes }}",
        runs_on="${{ fromJSON(inputs.runs_on) }}",
        name="${{ inputs.suite }}",
    )
    return _document("Run CPU suite", _COMMON, body)


def dependency_steps() -> list[Step]:
    """Only what was named: fetch and reset, check every patch, apply, install. The order is asserted by a test."""
    env = {"DEPENDENCY_COMMITS": "${{ inputs.dependency_commits }}"}
    names = {
        "checkout": "Fetch and reset the named dependencies",
        "check": "Check that every patch applies or is already present",
        "apply": "Apply patches",
        "install": "Install the named dependencies",
    }
    return [
        run(name, f"python -m miles_ci images dependencies {verb}", env=env, step_id=f"dependencies-{verb}")
        for verb, name in names.items()
    ]


def _gpu(name: str, options: str, *, unsafe_pr: bool) -> dict[str, Any]:
    steps = [
        clean_workspace("Clean the workspace"),
        checkout(ref="${{ inputs.ref }}", unsafe_pr=unsafe_pr),
        _plan(),
        *dependency_steps(),
        run(
            "Install the tested commit",
            "python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .",
        ),
        _run_suite(),
        _results(),
        clean_workspace("Clean the workspace again", when="always()"),
    ]
    container = {
        "image": "${{ inputs.image }}",
        "options": options,
        "volumes": ["/data/models:/models:ro", "/var/lib/miles-ci/locks:/var/lib/miles-ci/locks"],
    }
    # The lock folder is shared by the runners of a host: a job sees all devices and leases its own.
    extra = {
        "container": container,
        "env": {"HF_HUB_CACHE": "/models", "HF_HUB_OFFLINE": "1", "MILES_CI_LOCK_DIR": "/var/lib/miles-ci/locks"},
    }
    body = job(
        steps=steps,
        permissions={"contents": "read"},
        minutes="${{ inputs.timeout_minutes }}",
        runs_on="${{ fromJSON(inputs.runs_on) }}",
        name="${{ inputs.suite }}",
        extra=extra,
    )
    return _document(name, _COMMON | _GPU, body)


def documents() -> dict[str, dict[str, Any]]:
    cuda = "--gpus all --shm-size 32g --ulimit memlock=-1 --ulimit stack=67108864"
    rocm = "--device /dev/kfd --device /dev/dri --group-add video --group-add render --shm-size 32g --ulimit memlock=-1"
    return {
        "_run-cpu-ci.yml": _cpu(),
        "_run-ci.yml": _gpu("Run CUDA suite", cuda, unsafe_pr=False),
        "_run-ci-rocm.yml": _gpu("Run ROCm suite", rocm, unsafe_pr=True),
    }
