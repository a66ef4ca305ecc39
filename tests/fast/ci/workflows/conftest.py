from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_ci.registry import Fleet, load_fleet
from miles_ci.workflows.generate import render
from miles_ci.workflows.model import Workflow

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    return load_fleet(ROOT / "registry.yaml")


@pytest.fixture(scope="session")
def workflows(fleet: Fleet) -> Mapping[str, Workflow]:
    """What the generator makes now, parsed; the drift test compares it with the committed files."""
    return {Path(path).name: Workflow.from_text(text, path) for path, text in render(fleet).items()}
