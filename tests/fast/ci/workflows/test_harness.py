"""Where generated jobs find the harness: a folder of the repository, or one released version."""

from __future__ import annotations

import re

import pytest

from miles_ci.registry import Fleet
from miles_ci.workflows.generate import render
from miles_ci.workflows.model import parse_yaml

CALL = "python -m miles_ci"


def jobs(fleet: Fleet, harness: str) -> list[dict]:
    found = render(fleet.model_copy(update={"harness": harness})).values()
    return [body for text in found for body in parse_yaml(text)["jobs"].values() if "steps" in body]


def scripts(body: dict) -> str:
    return "\n".join(step.get("run", "") for step in body["steps"])


def test_jobs_that_call_the_harness_of_a_folder_import_it_from_there(fleet: Fleet) -> None:
    for body in jobs(fleet, "./tools/harness"):
        folder = (body.get("env") or {}).get("PYTHONPATH")
        assert folder == ("tools/harness" if CALL in scripts(body) else None)
        assert "@harness" not in scripts(body)


def test_jobs_of_a_released_harness_install_that_version_before_they_call_it(fleet: Fleet) -> None:
    seen = 0
    for body in jobs(fleet, "miles-ci[run]==1.2.3"):
        text = scripts(body)
        assert "PYTHONPATH" not in (body.get("env") or {})
        # GPU jobs run in an image that holds the harness.
        if CALL in text and "container" not in body:
            assert text.index("constraints.txt 'miles-ci[run]==1.2.3'\n") < text.index(CALL)
            seen += 1
    assert seen >= 8


def test_requirements_of_a_shard_are_those_of_the_project_and_of_a_harness_in_a_folder(fleet: Fleet) -> None:
    line = re.compile(r"miles_ci\.workflows\.requirements (.*) >")
    ours, theirs = (
        {found[1] for body in jobs(fleet, harness) for found in line.finditer(scripts(body))}
        for harness in ("./ci", "miles-ci==1.2.3")
    )
    assert ours == {"pyproject.toml ci/pyproject.toml --extra run --extra postgres --extra dev"}
    assert theirs == {"pyproject.toml --extra dev"}


@pytest.mark.parametrize(
    "harness", ["ci", "../ci", "./ci; id", "./ci $(id)", "miles-ci", "miles-ci>=1", "miles-ci==1'", "./../ci", "./"]
)
def test_a_harness_that_a_shell_could_read_differently_is_refused(fleet: Fleet, harness: str) -> None:
    with pytest.raises(ValueError, match="harness"):
        Fleet.model_validate(fleet.model_dump() | {"harness": harness})
