"""`--set`: how a key and value are read, what wins, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.config.overrides import apply_overrides, merge, parse_override


def test_value_is_read_as_yaml() -> None:
    assert parse_override("train.optimizer.lr=2e-3") == (("train", "optimizer", "lr"), 0.002)
    assert parse_override("a=[1, 2]") == (("a",), [1, 2])
    assert parse_override("a=") == (("a",), None)
    assert parse_override(" a.b = x=y ") == (("a", "b"), "x=y")


@pytest.mark.parametrize("text", ["a.b", "=1", "a..b=1", ".a=1", "a.=1"])
def test_malformed_override_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as section\.key=value"):
        parse_override(text)


def test_a_value_cannot_smuggle_in_a_second_key() -> None:
    with pytest.raises(ConfigError, match="holds more than one value"):
        parse_override("a=1\nb: 2")


def test_later_override_wins_and_the_input_is_not_touched() -> None:
    data = {"a": {"b": 1, "c": 2}}
    result, origin = apply_overrides(data, ["a.b=3", "a.d.e=x", "a.b=4"])
    assert result == {"a": {"b": 4, "c": 2, "d": {"e": "x"}}}
    assert data == {"a": {"b": 1, "c": 2}}
    assert origin == {("a", "b"): "--set a.b=4", ("a", "d", "e"): "--set a.d.e=x"}


def test_override_below_a_value_is_refused_and_an_empty_section_is_filled() -> None:
    with pytest.raises(ConfigError, match=r"--set a\.b=1: 'a' is a value, not a section"):
        apply_overrides({"a": 3}, ["a.b=1"])
    assert apply_overrides({"a": None}, ["a.b=1"])[0] == {"a": {"b": 1}}


def test_merge_goes_into_mappings_and_replaces_lists() -> None:
    base = {"a": {"x": 1, "l": [1, 2]}, "b": 1}
    assert merge(base, {"a": {"l": [3], "y": 2}, "b": {"c": 1}}) == {"a": {"x": 1, "l": [3], "y": 2}, "b": {"c": 1}}
    assert base == {"a": {"x": 1, "l": [1, 2]}, "b": 1}


KEYS = st.sampled_from(["a", "b", "c"])
TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=6
).filter(lambda tree: isinstance(tree, dict))


@given(TREES, TREES, TREES)
def test_merge_is_associative_and_the_empty_mapping_changes_nothing(a: dict, b: dict, c: dict) -> None:
    assert merge(a, {}) == a == merge({}, a)
    # A value between two sections cuts the lower one off, so the order of merging matters only there.
    if _same_shape(a, b) and _same_shape(b, c) and _same_shape(a, c):
        assert merge(merge(a, b), c) == merge(a, merge(b, c))


def _same_shape(left: object, right: object) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return all(_same_shape(left[key], right[key]) for key in left.keys() & right.keys())
    return not isinstance(left, dict) and not isinstance(right, dict)
