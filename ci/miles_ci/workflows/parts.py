"""Building blocks of the generated workflows: pinned actions, steps, conditions.

No step contains an expression inside `run`: values reach scripts through `env` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_ci.workflows.emit import Folded, Pinned
from miles_ci.workflows.model import WorkflowError, parse_yaml

Step = dict[str, Any]
LOCK = Path(__file__).with_name("actions.lock.yaml")
HOSTED = "ubuntu-24.04"
PYTHON = "3.11"
PIP = "python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt"
# Minutes beyond a suite's own limit: checkout, health check, upload.
EXTRA_MINUTES = 20
# Replaced when a document is rendered, see `miles_ci.workflows.harness`.
HARNESS_NEEDS, HARNESS_PROJECTS = "@harness-needs@", "@harness-projects@"
PRELUDE = "set -euo pipefail\n"


@cache
def _lock() -> dict[str, dict[str, str]]:
    locked: dict[str, dict[str, str]] = parse_yaml(LOCK.read_text(encoding="utf-8"))
    return locked


def action(name: str) -> Pinned:
    """A `uses` value pinned to the commit in the lock file."""
    if name not in _lock():
        raise WorkflowError(f"{name} is not in {LOCK.name}: add its version and commit there")
    entry = _lock()[name]
    return Pinned(f"{name}@{entry['sha']}", entry["version"])


def run(
    name: str, script: str, *, env: Mapping[str, str] | None = None, when: str | None = None, step_id: str | None = None
) -> Step:
    """A script step; `script` gets `set -euo pipefail` in front."""
    step: Step = {"name": name}
    if step_id:
        step["id"] = step_id
    if when:
        step["if"] = when
    step["shell"] = "bash"
    if env:
        step["env"] = dict(sorted(env.items()))
    step["run"] = PRELUDE + script.strip("\n") + "\n"
    return step


def checkout(
    *,
    ref: str | None = None,
    path: str | None = None,
    unsafe_pr: bool = False,
    name: str = "Check out",
    depth: int | None = None,
    when: str | None = None,
) -> Step:
    given: dict[str, Any] = {"persist-credentials": False}
    if ref:
        given["ref"] = ref
    if path:
        given["path"] = path
    if depth is not None:
        given["fetch-depth"] = depth
    if unsafe_pr:
        given["allow-unsafe-pr-checkout"] = True
    step: Step = {"name": name, "uses": action("actions/checkout"), "with": dict(sorted(given.items()))}
    return step if when is None else {"name": name, "if": when, **{k: v for k, v in step.items() if k != "name"}}


def setup_python() -> Step:
    return {"name": "Set up Python", "uses": action("actions/setup-python"), "with": {"python-version": PYTHON}}


def install_ci() -> Step:
    """What `python -m miles_ci` needs, from our constraints; never anything of a pull request on a privileged job."""
    return run("Install what the harness needs", f"{PIP} {HARNESS_NEEDS}")


def trusted_tools() -> list[Step]:
    """Default-branch code and its dependencies, for jobs with more than read access."""
    return [
        checkout(name="Check out the default branch", ref="${{ github.event.repository.default_branch }}"),
        setup_python(),
        install_ci(),
    ]


def upload(name: str, path: str, *, when: str | None = "always()", missing: str = "error", days: int = 30) -> Step:
    step: Step = {"name": f"Upload {path}"}
    if when:
        step["if"] = when
    step["uses"] = action("actions/upload-artifact")
    # A rerun of failed jobs uploads under the same name again.
    step["with"] = {"if-no-files-found": missing, "name": name, "overwrite": True, "path": path, "retention-days": days}
    return step


def download(
    *,
    name: str | None = None,
    pattern: str | None = None,
    path: str,
    when: str | None = None,
    run_id: str | None = None,
) -> Step:
    step: Step = {"name": f"Download into {path}"}
    if when:
        step["if"] = when
    step["uses"] = action("actions/download-artifact")
    given: dict[str, Any] = {"path": path}
    if name:
        given["name"] = name
    if pattern:
        given |= {"pattern": pattern, "merge-multiple": False}
    if run_id:
        given |= {"run-id": run_id, "github-token": "${{ github.token }}"}
    step["with"] = dict(sorted(given.items()))
    return step


def app_token(*permissions: str, when: str | None = None) -> Step:
    """A token of our GitHub App: what it changes starts workflows, what GITHUB_TOKEN changes does not."""
    asked = {f"permission-{name.split(':')[0]}": name.split(":")[1] for name in permissions}
    return {
        "name": "App token",
        **({"if": when} if when else {}),
        "id": "app",
        "uses": action("actions/create-github-app-token"),
        "with": {
            "app-id": "${{ vars.MILES_CI_APP_ID }}",
            **dict(sorted(asked.items())),
            "private-key": "${{ secrets.MILES_CI_APP_KEY }}",
        },
    }


def clean_workspace(name: str, when: str | None = None) -> Step:
    """Leaves nothing of an earlier run on a self-hosted machine, and nothing of this one."""
    return run(name, 'find "${GITHUB_WORKSPACE:?}" -mindepth 1 -delete', when=when)


def job(
    *,
    steps: list[Step],
    permissions: Mapping[str, str],
    minutes: int | str = 10,
    needs: Iterable[str] = (),
    condition: str | None = None,
    outputs: Mapping[str, str] | None = None,
    runs_on: Any = HOSTED,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if name:
        out["name"] = name
    if needs:
        out["needs"] = list(needs)
    if condition:
        out["if"] = Folded(condition)
    out["runs-on"] = runs_on
    out["timeout-minutes"] = minutes
    out["permissions"] = dict(sorted(permissions.items()))
    out |= extra or {}
    if outputs:
        out["outputs"] = dict(outputs)
    out["steps"] = steps
    return out


def call(
    workflow: str,
    *,
    permissions: Mapping[str, str],
    given: Mapping[str, Any] | None = None,
    needs: Iterable[str] = (),
    condition: str | None = None,
    matrix: str | None = None,
    secrets: Iterable[str] = (),
    name: str | None = None,
) -> dict[str, Any]:
    """A job that calls a reusable workflow; secrets are passed by name."""
    out: dict[str, Any] = {}
    if name:
        out["name"] = name
    if needs:
        out["needs"] = list(needs)
    if condition:
        out["if"] = Folded(condition)
    out["permissions"] = dict(sorted(permissions.items()))
    if matrix:
        out["strategy"] = {"fail-fast": False, "matrix": matrix}
    # GitHub's own form for a file of the same repository and commit.
    out["uses"] = f"$/.github/workflows/{workflow}"
    if given:
        out["with"] = dict(given)
    if secrets:
        out["secrets"] = {secret: f"${{{{ secrets.{secret} }}}}" for secret in sorted(secrets)}
    return out


def both(*conditions: str) -> str:
    """All of them; the literal `true` says nothing and is left out."""
    return " && ".join(part for part in conditions if part != "true")


def either(*conditions: str) -> str:
    """Any of them, in parentheses when there are several."""
    if "true" in conditions:
        return "true"
    return f"({' || '.join(conditions)})" if len(conditions) > 1 else conditions[0]


def succeeded(job_id: str) -> str:
    return f"needs.{job_id}.result == 'success'"


def output(job_id: str, name: str) -> str:
    return f"needs.{job_id}.outputs.{name}"


def outputs_of(step_id: str, names: Iterable[str]) -> dict[str, str]:
    return {name: f"${{{{ steps.{step_id}.outputs.{name} }}}}" for name in names}
