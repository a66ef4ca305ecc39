"""`nightly.yml`, `weekly.yml`, `release.yml`: each calls both test workflows with an explicit cadence.

A called workflow inherits the event of its caller, so a cadence is never inferred there.
"""

from __future__ import annotations

from typing import Any

from miles_ci.errors import UsageError
from miles_ci.registry import Fleet
from miles_ci.workflows.files.pr_test import suites_of
from miles_ci.workflows.parts import call

# The union of what the called jobs ask for: a called workflow can only shrink it.
CUDA = {"checks": "read", "contents": "read", "packages": "write", "pull-requests": "read"}
ROCM = {"checks": "read", "contents": "read", "packages": "read", "pull-requests": "read"}


def _calls(fleet: Fleet, cadence: str, ref: str, image_tag: str) -> dict[str, Any]:
    given = {"cadence": cadence, "image_tag": image_tag, "ref": ref}
    jobs: dict[str, Any] = {"cuda": call("pr-test.yml", permissions=CUDA, given=given)}
    if suites_of(fleet, "rocm"):
        jobs["rocm"] = call("pr-test-rocm.yml", permissions=ROCM, given=given)
    return jobs


def _timed(fleet: Fleet, cadence: str) -> dict[str, Any]:
    crons = fleet.cadences[cadence].crons  # type: ignore[index]
    if not crons:
        raise UsageError(f"registry.yaml: cadences.{cadence}.crons is empty, so {cadence}.yml would never start")
    dispatch = {
        "inputs": {
            "image_tag": {
                "description": "Image tag to test, empty for the default",
                "type": "string",
                "required": False,
                "default": "",
            }
        }
    }
    return {
        "name": cadence.capitalize(),
        "on": {"schedule": [{"cron": cron} for cron in crons], "workflow_dispatch": dispatch},
        "permissions": {},
        "concurrency": {"group": cadence, "cancel-in-progress": False},
        "jobs": _calls(fleet, cadence, "${{ github.sha }}", "${{ inputs.image_tag || '' }}"),
    }


def _release(fleet: Fleet) -> dict[str, Any]:
    dispatch = {
        "inputs": {
            "image_tag": {"description": "Image tag to release", "type": "string", "required": False, "default": ""}
        }
    }
    return {
        "name": "Release",
        "on": {"push": {"branches": ["release/**"], "tags": ["v*"]}, "workflow_dispatch": dispatch},
        "permissions": {},
        "concurrency": {"group": "release-${{ github.ref }}", "cancel-in-progress": True},
        "jobs": _calls(fleet, "release", "${{ github.sha }}", "${{ inputs.image_tag || '' }}"),
    }


def documents(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {
        "nightly.yml": _timed(fleet, "nightly"),
        "weekly.yml": _timed(fleet, "weekly"),
        "release.yml": _release(fleet),
    }
