"""Comment gateway, approvals, `/rerun-test`, `/lint`, sweeper and status cards.

Jobs with more than read access check out the default branch only. The one exception reads a pull request's
files as data (`pr-source`, declarations by AST) and has read access alone.
"""

from __future__ import annotations

from typing import Any

from miles_ci.registry import Fleet
from miles_ci.workflows.parts import (
    PIP,
    Step,
    app_token,
    both,
    call,
    checkout,
    install_ci,
    job,
    outputs_of,
    run,
    setup_python,
    succeeded,
    trusted_tools,
    upload,
)

READ = {"contents": "read"}
TOKEN = {"GITHUB_TOKEN": "${{ github.token }}"}
APP_ID = {"APP_ID": "${{ vars.MILES_CI_APP_ID }}"}
# What an App's token needs to list a repository's runners.
RUNNER_PERMISSION = "administration:read"
APP = APP_ID | {"APP_TOKEN": "${{ steps.app.outputs.token }}"}
_REQUEST = {
    "COMMAND_COMMENT_ID": "${{ inputs.command_comment_id }}",
    "DIRECTIVES": "${{ inputs.directives }}",
    "HEAD_SHA": "${{ inputs.head_sha }}",
    "PULL_NUMBER": "${{ inputs.pull_number }}",
    "REQUESTER": "${{ inputs.requester }}",
    "REQUEST_ID": "${{ inputs.request_id }}",
    "SUITE": "${{ inputs.suite }}",
    "TEST_FILE": "${{ inputs.test_file }}",
    "TEST_NODE": "${{ inputs.node }}",
}


def _always(steps: list[Step]) -> list[Step]:
    """Every step runs also in a cancelled run: a report that is skipped would leave "running" behind."""
    return [
        {"name": step["name"], "if": "always()", **{k: v for k, v in step.items() if k != "name"}} for step in steps
    ]


def _input(description: str, *, required: bool = True) -> dict[str, Any]:
    extra = {} if required else {"default": ""}
    return {"description": description, "type": "string", "required": required, **extra}


def comment_gateway() -> dict[str, Any]:
    permissions = {"actions": "write", "checks": "read", "contents": "read", "pull-requests": "write"}
    steps = [
        *trusted_tools(),
        app_token("actions:write", "checks:write", "pull-requests:write"),
        run("Act on the comment", "python -m miles_ci bot gateway", env=TOKEN | APP),
    ]
    condition = both(
        "github.event.issue.pull_request",
        "github.event.comment.user.type == 'User'",
        "contains(github.event.comment.body, '/')",
    )
    return {
        "name": "Comment gateway",
        "on": {"issue_comment": {"types": ["created"]}},
        "permissions": {},
        "concurrency": {"group": "comment-${{ github.event.issue.number }}", "queue": "max"},
        "jobs": {"gateway": job(steps=steps, permissions=permissions, condition=condition)},
    }


def approve_trusted() -> dict[str, Any]:
    steps = [
        *trusted_tools(),
        app_token("actions:write", "checks:write", "pull-requests:write"),
        run("Approve the commit or explain", "python -m miles_ci bot approve", env=TOKEN | APP),
    ]
    condition = "github.event.action == 'synchronize' || github.event.label.name == 'ok-to-test'"
    permissions = {"checks": "read", "contents": "read", "pull-requests": "write"}
    return {
        "name": "Approve trusted",
        "on": {"pull_request_target": {"types": ["labeled", "synchronize"]}},
        "permissions": {},
        "concurrency": {"group": "approve-${{ github.event.pull_request.number }}", "queue": "max"},
        "jobs": {"approve": job(steps=steps, permissions=permissions, condition=condition)},
    }


def _legs(backend: str) -> dict[str, Any]:
    given: dict[str, Any] = {
        "artifact": "rerun-${{ matrix.suite }}",
        "file": "${{ inputs.test_file }}",
        "node": "${{ inputs.node }}",
        "ref": "${{ needs.resolve.outputs.sha }}",
        "runs_on": "${{ toJSON(matrix.runs_on) }}",
        "suite": "${{ matrix.suite }}",
        "timeout_minutes": "${{ matrix.timeout_minutes }}",
    }
    if backend != "cpu":
        given |= {
            "image": "${{ matrix.image }}",
            "dependency_commits": "${{ needs.resolve.outputs.dependency_commits }}",
        }
    return call(
        {"cpu": "_run-cpu-ci.yml", "cuda": "_run-ci.yml", "rocm": "_run-ci-rocm.yml"}[backend],
        permissions=READ,
        given=dict(sorted(given.items())),
        needs=["resolve"],
        condition=both("!cancelled()", succeeded("resolve"), f"needs.resolve.outputs.count_{backend} != '0'"),
        matrix=f"${{{{ fromJSON(needs.resolve.outputs.matrix_{backend}) }}}}",
        # The report finds the job of a suite by this name.
        name="rerun ${{ matrix.suite }}",
    )


def rerun_test() -> dict[str, Any]:
    backends = ("cpu", "cuda", "rocm")
    writes = READ | {"checks": "write", "pull-requests": "write"}
    announce = job(
        steps=[
            *trusted_tools(),
            run("Announce", "python -m miles_ci bot announce", env=TOKEN | _REQUEST, step_id="announce"),
        ],
        permissions=writes,
        outputs=outputs_of("announce", ["check_id", "comment_id"]),
    )
    resolve = job(
        steps=[
            checkout(name="Check out the default branch", ref="${{ github.event.repository.default_branch }}"),
            checkout(name="Check out the tested commit as data", ref="${{ inputs.head_sha }}", path="pr-source"),
            setup_python(),
            install_ci(),
            run(
                "Resolve the request",
                "python -m miles_ci bot resolve --root pr-source",
                env=TOKEN | _REQUEST | APP_ID,
                step_id="resolve",
            ),
        ],
        permissions=READ | {"checks": "read", "packages": "read", "pull-requests": "read"},
        needs=["announce"],
        condition="!cancelled()",
        outputs=outputs_of(
            "resolve",
            [
                *(f"{kind}_{backend}" for backend in backends for kind in ("count", "matrix")),
                "dependency_commits",
                "planned",
                "sha",
            ],
        ),
    )
    legs = {f"run-{backend}": _legs(backend) for backend in backends}
    names = ["announce", "resolve", *legs]
    env = {
        "CHECK_ID": "${{ needs.announce.outputs.check_id }}",
        "COMMENT_ID": "${{ needs.announce.outputs.comment_id }}",
        "NEEDS": "${{ toJSON(needs) }}",
        "PLANNED": "${{ needs.resolve.outputs.planned }}",
    }
    report = job(
        steps=_always([*trusted_tools(), run("Report", "python -m miles_ci bot report", env=TOKEN | _REQUEST | env)]),
        permissions=writes | {"actions": "read"},
        needs=names,
        condition="always()",
    )
    inputs = {
        "command_comment_id": _input("Comment that asked"),
        "directives": _input("Approved dependency commits, JSON", required=False),
        "head_sha": _input("Commit, 40 hex digits"),
        "node": _input("One test in the file", required=False),
        "pull_number": _input("Pull request"),
        "request_id": _input("32 hex digits"),
        "requester": _input("Login"),
        "suite": _input("Suite id, empty for all", required=False),
        "test_file": _input("Test file"),
    }
    return {
        "name": "Rerun test",
        "run-name": "rerun ${{ inputs.test_file }} [${{ inputs.request_id }}]",
        "on": {"workflow_dispatch": {"inputs": inputs}},
        "permissions": {},
        "concurrency": {
            "group": "rerun-${{ inputs.pull_number }}-${{ inputs.test_file }}-${{ inputs.suite }}",
            "queue": "max",
        },
        "jobs": {"announce": announce, "resolve": resolve, **legs, "report": report},
    }


def lint_patch() -> dict[str, Any]:
    """`/lint`: format the exact commit without write access, offer the patch for download."""
    steps = [
        checkout(name="Check out the default branch", ref="${{ github.event.repository.default_branch }}"),
        checkout(name="Check out the commit to format", ref="${{ inputs.head_sha }}", path="pr-source"),
        setup_python(),
        run(
            "Install the formatter",
            f"{PIP} ruff",
        ),
        # The default branch's settings: a pull request cannot choose what the formatter reads.
        run(
            "Format",
            """
ruff format --config pyproject.toml pr-source
ruff check --config pyproject.toml --fix --exit-zero --quiet pr-source
git -C pr-source diff --binary > lint.patch
size="$(wc -c < lint.patch)"
echo "size=$size" >> "$GITHUB_OUTPUT"
if (( size > 1048576 )); then echo "the patch has $size bytes, more than 1 MiB" >&2; exit 1; fi
""",
            step_id="format",
        ),
        upload("lint-patch", "lint.patch", when=None, days=7),
    ]
    request = {
        "HEAD_SHA": "${{ inputs.head_sha }}",
        "PULL_NUMBER": "${{ inputs.pull_number }}",
        "REQUEST_ID": "${{ inputs.request_id }}",
    }
    report_env = TOKEN | request | {"RESULT": "${{ needs.format.result }}", "SIZE": "${{ needs.format.outputs.size }}"}
    inputs = {
        "head_sha": _input("Commit, 40 hex digits"),
        "pull_number": _input("Pull request"),
        "request_id": _input("32 hex digits"),
    }
    return {
        "name": "Lint patch",
        "run-name": "lint #${{ inputs.pull_number }} [${{ inputs.request_id }}]",
        "on": {"workflow_dispatch": {"inputs": inputs}},
        "permissions": {},
        "concurrency": {"group": "lint-${{ inputs.pull_number }}", "queue": "max"},
        "jobs": {
            "format": job(steps=steps, permissions=READ, outputs=outputs_of("format", ["size"])),
            "report": job(
                steps=_always(
                    [
                        *trusted_tools(),
                        run("Tell how to apply it", "python -m miles_ci bot lint-report", env=report_env),
                    ]
                ),
                permissions=READ | {"pull-requests": "write"},
                needs=["format"],
                condition="always()",
            ),
        },
    }


def status_sweeper() -> dict[str, Any]:
    permissions = {"actions": "read", "checks": "write", "contents": "read", "pull-requests": "write"}
    steps = [*trusted_tools(), run("Finish what was left behind", "python -m miles_ci bot sweep", env=TOKEN)]
    # GITHUB_TOKEN cannot list runners. Of its own, so that a missing permission of the App holds up no comment.
    waiting = [
        *trusted_tools(),
        app_token(RUNNER_PERMISSION, when="vars.MILES_CI_APP_ID != ''"),
        run(
            "Report jobs that wait for nobody",
            "python -m miles_ci bot starvation",
            env=TOKEN | {"APP_TOKEN": APP["APP_TOKEN"]},
        ),
    ]
    return {
        "name": "Status sweeper",
        "on": {"schedule": [{"cron": "*/30 * * * *"}], "workflow_dispatch": {}},
        "permissions": {},
        "concurrency": {"group": "status-sweeper"},
        "jobs": {
            "starvation": job(steps=waiting, permissions=READ | {"actions": "read"}),
            "sweep": job(steps=steps, permissions=permissions),
        },
    }


def status_card(fleet: Fleet, watched: list[str]) -> dict[str, Any]:
    secrets = sorted({entry.secret for entry in fleet.notify.values() if entry.secret})
    env = {name: f"${{{{ secrets.{name} }}}}" for name in secrets}
    if any(entry.kind == "lark" for entry in fleet.notify.values()):
        env["LARK_SIGNING_SECRET"] = "${{ secrets.LARK_SIGNING_SECRET }}"
    steps = [*trusted_tools(), run("Write the cards", "python -m miles_ci bot card", env=TOKEN | env)]
    return {
        "name": "Status card",
        "on": {"workflow_run": {"workflows": watched, "types": ["completed"]}},
        "permissions": {},
        "concurrency": {"group": "status-card-${{ github.event.workflow_run.id }}"},
        "jobs": {
            "card": job(steps=steps, permissions={"actions": "read", "contents": "read", "pull-requests": "write"})
        },
    }


def documents(fleet: Fleet, watched: list[str]) -> dict[str, dict[str, Any]]:
    return {
        "approve-trusted.yml": approve_trusted(),
        "comment-gateway.yml": comment_gateway(),
        "lint-patch.yml": lint_patch(),
        "rerun-test.yml": rerun_test(),
        "status-card.yml": status_card(fleet, watched),
        "status-sweeper.yml": status_sweeper(),
    }
