"""Splitting a file never loses or doubles an item, and keeps together what belongs together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.plan.split import group_of, groups_of, split, splittable

names = st.sampled_from(
    [
        "test_a",
        "test_b[1]",
        "test_b[x@y]",
        "C::test_a",
        "C::test_b",
        "D::test_a[0]",
        "test_c@g1",
        "E::test_x@g1",
        "test_d@g2",
    ]
)
items = st.dictionaries(
    names.map(lambda name: f"tests/e2e/test_x.py::{name}"), st.none() | st.integers(0, 500), min_size=1
)


@given(items=items, parts=st.integers(1, 6))
@settings(max_examples=200)
def test_every_item_runs_in_exactly_one_part(items: dict[str, int | None], parts: int) -> None:
    found = split(items, parts)
    assert [part.index for part in found] == list(range(1, len(found) + 1))
    assert len(found) <= parts
    first, rest = found[0], found[1:]
    named = [node for part in rest for node in part.nodes or ()]
    assert first.nodes is None
    assert sorted(first.deselect) == sorted(named)
    assert len(set(named)) == len(named)
    assert all(part.nodes for part in rest)
    assert set(named) < {node.split("@g")[0] for node in items}


@given(items=items, parts=st.integers(2, 6))
def test_groups_stay_whole(items: dict[str, int | None], parts: int) -> None:
    found = split(items, parts)
    where = {node: part.index for part in found[1:] for node in part.nodes or ()}
    for members in groups_of(items).values():
        assert len({where.get(node.split("@g")[0], 1) for node in members}) == 1


def test_a_new_item_runs_in_part_one() -> None:
    known = {f"t.py::test_{index}": 100 for index in range(4)}
    first = split(known, 2)[0]
    assert first.nodes is None
    assert "t.py::test_new" not in first.deselect


def test_groups_are_classes_and_xdist_groups() -> None:
    assert group_of("t.py::C::test_a[1]") == "::C"
    assert group_of("t.py::test_a@db") == "@db"
    assert group_of("t.py::test_a[x@y]") == "t.py::test_a[x@y]"


def test_a_file_is_split_only_when_nine_of_ten_durations_are_known() -> None:
    known = {f"t.py::test_{index}": 10 for index in range(9)}
    assert splittable({**known, "t.py::test_9": None})
    assert not splittable({**known, "t.py::test_9": None, "t.py::test_10": None})
    assert not splittable({})
    assert not splittable({"t.py::C::test_a": 1, "t.py::C::test_b": 1})


def test_parts_are_balanced_by_duration() -> None:
    found = split({f"t.py::test_{index}": size for index, size in enumerate([90, 50, 40])}, 2)
    assert sorted(part.ms for part in found) == [90, 90]
