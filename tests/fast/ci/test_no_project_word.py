"""The harness knows no project: what it tests is named in the repository's own files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.fast.ci.helpers.trees import REPOSITORY

# `miles-ci`, `miles_ci` and `MILES_CI_` are the harness' own name.
OURS = r"(?<![a-z])miles(?![-_]ci|tone)"


def project_words() -> list[str]:
    """Dependencies, image repositories and base images of this repository."""
    catalog = yaml.safe_load((REPOSITORY / "docker/images.yaml").read_text())
    registry = yaml.safe_load((REPOSITORY / "registry.yaml").read_text())
    repositories = [image["repository"] for image in registry["images"].values()]
    bases = [image["base"].partition(":")[0] for image in catalog["images"].values()]
    return [re.escape(word) for word in (*catalog["dependencies"], *repositories, *bases)]


def found_words(text: str) -> list[str]:
    return re.findall("|".join((OURS, *project_words())), text, re.IGNORECASE)


def test_no_file_of_the_harness_names_what_it_tests() -> None:
    files = [path for path in (REPOSITORY / "ci").rglob("*") if path.is_file()]
    texts = [path for path in files if not {"node_modules", "__pycache__", "build"} & set(path.parts)]
    texts = [path for path in texts if not any(part.endswith(".egg-info") for part in path.parts)]
    assert len(texts) > 150
    assert {
        str(path.relative_to(REPOSITORY)): words for path in texts if (words := found_words(path.read_text()))
    } == {}


@pytest.mark.parametrize("text", ["import miles", "Miles trains", "SGLang", "MEGATRON_SHA", "ghcr.io/miles-rl/miles"])
def test_the_words_are_recognised(text: str) -> None:
    assert found_words(text)


@pytest.mark.parametrize("text", ["miles-ci run", "from miles_ci.cli import main", "MILES_CI_PLAN", "milestone"])
def test_the_harness_may_say_its_own_name(text: str) -> None:
    assert not found_words(text)


def test_the_root_of_the_harness_holds_a_distribution_and_nothing_else() -> None:
    entries = {path.name for path in Path(REPOSITORY / "ci").iterdir() if not path.name.endswith(".egg-info")}
    assert entries - {"build", "__pycache__"} == {"README.md", "miles_ci", "pyproject.toml"}
