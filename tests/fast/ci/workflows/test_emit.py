"""Our YAML writer: what goes in comes back, whatever it is, and the text is what a person would write."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_ci.workflows.emit import Folded, Pinned, fold, to_yaml
from miles_ci.workflows.model import parse_yaml

TEXT = st.text(
    st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="\u2028\u2029\ufeff\x85"), max_size=30
)
WORDS = st.sampled_from(["true", "no", "on", "null", "~", "1", "1.5", "0x1", "1e3", "12:30", "2026-01-01", "- a", "a: b", "a #b", "${{ x }}", "*a", "&a", "!x", "", " ", "a\nb", "x\n\n  y\n", "a:", "%", "@", "`", "'", '"', "\\", "|", ">", "?", "{", "[", ".5", "+1", ".inf"])  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXT | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXT.filter(bool) | WORDS.filter(lambda w: "\n" not in w), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@example({"on": ["A?"]})
@given(st.dictionaries(st.sampled_from(["on", "jobs", "name", "x-y"]), VALUES, min_size=1, max_size=3))
def test_everything_reads_back_as_it_was(document: dict[str, Any]) -> None:
    text = to_yaml(document)
    assert parse_yaml(text) == document
    assert text.endswith("\n")
    assert "\r" not in text


def test_a_yaml_1_1_reader_sees_the_same_strings() -> None:
    document = {"x": ["yes", "no", "on", "12:30", "1_000", "true"], "y": "off"}
    assert yaml.safe_load(to_yaml(document)) == document


def test_pins_carry_their_version_and_conditions_are_broken_at_their_outermost_operators() -> None:
    text = to_yaml({"uses": Pinned("a/b@" + "0" * 40, "v1.2"), "if": Folded("!cancelled() && (a || b) && x == ' && '")})
    assert f"uses: a/b@{'0' * 40} # v1.2\n" in text
    assert "if: >-\n  !cancelled() &&\n  (a || b) &&\n  x == ' && '\n" in text
    assert parse_yaml(text)["if"] == "!cancelled() && (a || b) && x == ' && '"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ["a"]),
        ("a && b", ["a &&", "b"]),
        ("(a && b) || c", ["(a && b) ||", "c"]),
        ("f(x && y) && 'a && b'", ["f(x && y) &&", "'a && b'"]),
    ],
)
def test_fold(text: str, parts: list[str]) -> None:
    assert fold(text) == parts


def test_a_duplicate_key_is_an_error_of_reading() -> None:
    with pytest.raises(Exception, match="duplicate key 'a'"):
        parse_yaml("a: 1\na: 2\n")
