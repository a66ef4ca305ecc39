"""The environment of a test process: what it inherits, and where it finds the harness."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

import miles_ci
from miles_ci.run.process.pytest_process import Files, environment

PARENT = str(Path(miles_ci.__file__).resolve().parents[1])


def of(tmp_path: Path, **base: str) -> dict[str, str]:
    return environment(base, Files.below(tmp_path, "unit", 1), {}, gpu=False)


def test_a_harness_in_a_folder_is_found_behind_what_the_caller_has_on_its_path(tmp_path) -> None:
    assert of(tmp_path)["PYTHONPATH"] == PARENT
    assert of(tmp_path, PYTHONPATH="/theirs")["PYTHONPATH"] == f"/theirs:{PARENT}"


@pytest.mark.parametrize("scheme", ["purelib", "platlib"])
def test_an_installed_harness_leaves_the_path_alone(tmp_path, monkeypatch, scheme: str) -> None:
    """All of site-packages before the standard library would let a backport shadow it."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: PARENT if name == scheme else "/elsewhere")
    assert "PYTHONPATH" not in of(tmp_path)
    assert of(tmp_path, PYTHONPATH="/theirs")["PYTHONPATH"] == "/theirs"


def test_what_belongs_to_another_test_is_not_inherited(tmp_path) -> None:
    made = of(tmp_path, MILES_CI_LEASE="{}", MILES_CI_UNIT="other", HOME="/h")
    assert (made["HOME"], "MILES_CI_LEASE" in made, "MILES_CI_UNIT" in made) == ("/h", False, False)
