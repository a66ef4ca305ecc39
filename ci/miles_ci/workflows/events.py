"""Events that start workflows on GitHub, and whether one starts a given workflow."""

from __future__ import annotations

from collections.abc import Mapping

from miles_ci.errors import UsageError, suggestion
from miles_ci.workflows.model import Workflow

# docs.github.com: events that trigger workflows.
EVENTS = frozenset(
    {
        "branch_protection_rule",
        "check_run",
        "check_suite",
        "create",
        "delete",
        "deployment",
        "deployment_status",
        "discussion",
        "discussion_comment",
        "fork",
        "gollum",
        "image_version",
        "issue_comment",
        "issues",
        "label",
        "merge_group",
        "milestone",
        "page_build",
        "public",
        "pull_request",
        "pull_request_review",
        "pull_request_review_comment",
        "pull_request_target",
        "push",
        "registry_package",
        "release",
        "repository_dispatch",
        "schedule",
        "status",
        "watch",
        "workflow_call",
        "workflow_dispatch",
        "workflow_run",
    }
)


def started_by(workflows: Mapping[str, Workflow], event: str) -> list[str]:
    """File names of the workflows that an event starts, sorted; an event that GitHub does not know is an error."""
    if event not in EVENTS:
        raise UsageError(f"--event {event}: GitHub has no such event{suggestion(event, EVENTS)}")
    return sorted(name for name, workflow in workflows.items() if event in workflow.on)


def check_starts(workflows: Mapping[str, Workflow], name: str, event: str) -> None:
    """Raises when the event neither starts the workflow nor can reach it through a workflow that calls it.

    In a called workflow the event is that of its caller.
    """
    starts, workflow = started_by(workflows, event), workflows[name]
    if name in starts or "workflow_call" in workflow.on:
        return
    others = f"; '{event}' starts {', '.join(starts)}" if starts else ""
    raise UsageError(f"--event {event}: {name} runs on {', '.join(sorted(workflow.on))}{others}")


def default_workflow(workflows: Mapping[str, Workflow], event: str) -> str:
    """The test workflow that an event starts by itself."""
    name = "pr-test-rocm.yml" if event == "pull_request_target" else "pr-test.yml"
    starts = started_by(workflows, event)
    if name in workflows and name not in starts:
        what = f"name one of {', '.join(starts)} with --workflow" if starts else "no workflow here runs on it"
        raise UsageError(f"--event {event}: starts no test workflow by itself; {what}")
    return name
