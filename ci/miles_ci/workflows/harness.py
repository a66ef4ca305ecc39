"""Where a generated job finds `miles_ci`: in a folder of the repository, or installed at one version.

From a folder it is imported through PYTHONPATH and nothing is built, so a privileged job runs only what is checked
out and what `constraints.txt` pins. GPU jobs run in an image; what it holds of the harness is not used then.
"""

from __future__ import annotations

from typing import Any

from miles_ci.workflows.parts import HARNESS_NEEDS, HARNESS_PROJECTS

CALL = "python -m miles_ci"


def place_harness(document: dict[str, Any], harness: str) -> dict[str, Any]:
    """The document with every job that calls the harness made able to; `harness` as in registry.yaml."""
    folder = harness.removeprefix("./") if harness.startswith("./") else None
    words = {
        HARNESS_NEEDS: "pydantic pyyaml" if folder else f"'{harness}'",
        HARNESS_PROJECTS: f"{folder}/pyproject.toml --extra run --extra postgres" if folder else "",
    }
    jobs = {name: _placed(body, words, folder) for name, body in document["jobs"].items()}
    return {**document, "jobs": jobs}


def _placed(body: dict[str, Any], words: dict[str, str], folder: str | None) -> dict[str, Any]:
    if "steps" not in body:
        return body
    steps = [_filled(step, words) for step in body["steps"]]
    out = {name: value for name, value in body.items() if name != "steps"}
    if folder and any(CALL in step.get("run", "") for step in steps):
        out["env"] = {**body.get("env", {}), "PYTHONPATH": folder}
    return out | {"steps": steps}


def _filled(step: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    if "run" not in step:
        return step
    script = step["run"]
    for word, value in words.items():
        script = script.replace(f" {word}" if not value else word, value)
    return {**step, "run": script}
