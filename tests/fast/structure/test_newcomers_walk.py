"""The walks of docs/architecture.md: at most twelve files each, all there, each one or two imports from an earlier one."""

from __future__ import annotations

import re

import pytest
from import_graph import ROOT, import_graph

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = [
    [line.split()[0] for line in block.strip().splitlines()]
    for block in re.findall(r"```text walk\n(.*?)```", PAGE, re.DOTALL)
]


def module_of(path: str) -> str:
    return path.removeprefix("ci/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def neighbours(package: str) -> dict[str, set[str]]:
    """Module -> those that it imports or that import it."""
    both: dict[str, set[str]] = {}
    for module, imported in import_graph(package, lazy=True).items():
        for other in imported:
            both.setdefault(module, set()).add(other)
            both.setdefault(other, set()).add(module)
    return both


def test_there_is_a_walk_for_a_sample_and_one_for_a_test() -> None:
    assert [walk[0].split("/")[0] for walk in WALKS] == ["miles", "ci"]
    assert (WALKS[0][-1], WALKS[1][-1]) == ("miles/sync/session.py", "ci/miles_ci/report/cards/model.py")


@pytest.mark.parametrize("walk", WALKS, ids=["sample", "test"])
def test_a_walk_has_at_most_twelve_files_and_each_follows_from_an_earlier_one(walk: list[str]) -> None:
    assert 2 <= len(walk) == len(set(walk)) <= 12
    assert [path for path in walk if not (ROOT / path).is_file()] == []
    modules = [module_of(path) for path in walk]
    near = neighbours(modules[0].split(".")[0])
    for number, module in enumerate(modules[1:], start=1):
        around = near[module].union(*(near[other] for other in near[module]))
        assert around & set(modules[:number]), f"{walk[number]} has nothing to do with the files before it"
