"""One word for one thing: words that the glossary has replaced do not come back into the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT

# Dropped word as a regular expression -> what to write instead. Only the harness: a model may have gates.
DROPPED = {
    r"(?<![a-z])gates?(?![a-z])": "metric bound, needs, required check, or condition: whichever it is",
    r"(?<![a-z])dark(?![a-z])": "never executed",
    r"\b(cpu|gpu)_form\b": "cpu_runner, gpu_runner",
    r"\bmiles_ci\.(fleet|run\.(evidence|outcome|supervise|supervisor|gates|dark))\b": "the room's module",
    r"\bRunUnit\b": "Unit",
    r"\bmiles-ci act\b": "miles-ci simulate-workflow",
    r"^from ci\b|^import ci\b|\bpython -m ci\b": "miles_ci",
}
# The refusals of former names have to say them.
SAYS_FORMER_NAMES = {"ci/miles_ci/declare/reader.py", "ci/miles_ci/registry/load.py"}


def dropped_words(text: str) -> list[str]:
    return [f"{found[0]!r}: write {wanted}" for pattern, wanted in DROPPED.items()
            for found in re.finditer(pattern, text, re.MULTILINE | re.IGNORECASE)]  # fmt: skip


def sources() -> list[Path]:
    paths = [ROOT / "registry.yaml", *(ROOT / "ci/miles_ci").rglob("*.py"), *(ROOT / "ci/miles_ci").rglob("*.yaml")]
    return [path for path in paths if path.relative_to(ROOT).as_posix() not in SAYS_FORMER_NAMES]


def test_no_dropped_word_is_in_the_harness() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): words for path in sources() if (words := dropped_words(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    ["gate: stage-a-cpu", "a gated_file or gate_row", "DARK  x", "dark_tests", "gpu_form", "from ci.run import x"],
)
def test_a_dropped_word_is_recognised(text: str) -> None:
    assert dropped_words(text)


@pytest.mark.parametrize(
    "text", ["comment gateway", "aggregate", "needs: stage-a-cpu", "navigates", "from miles_ci.run import x"]
)
def test_words_that_only_contain_one_are_not(text: str) -> None:
    assert not dropped_words(text)
