"""Text from outside cannot do anything to a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.observe.visible_text import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext é 漢", "plain\n\ttext é 漢"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\rb\x00\x7f\x9b", "a\\x0db\\x00\\x7f\\x9b"),
        ("left\u202eright\u2066", "left\\u202eright\\u2066"),
        ("\u200bzero\ufeff\u2028", "\\u200bzero\\ufeff\\u2028"),
        ("\U000e0041\ud800", "\\U000e0041\\ud800"),
        ("👩\u200d👧", "👩\u200d👧"),
    ],
)
def test_what_a_reader_sees(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(alphabet=st.characters(), max_size=50))
def test_nothing_that_controls_is_left(text: str) -> None:
    left = [c for c in visible(text) if unicodedata.category(c)[0] == "C" and c not in "\n\t\u200c\u200d"]
    assert left == []
